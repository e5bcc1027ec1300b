"""The fused steps on whole tiny models: transformers as the oracle, and batch invariance."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import CacheFormat
from localrt.quant.ops.protocol import Batch
from tests.conftest import needs_kernels
from tests.models.tiny import CONFIGS, load_ours, oracle, relative_error, tokens
from tests.ops.code_paths import digest, digests, fill, known
from tests.ops.test_native_matmul import ISAS

pytestmark = needs_kernels

# Weights are float32 here: what remains is the cache, which is bf16.
TOLERANCE = 0.03
LENGTH = 40


def load(folder: Path, *, threads: int = 2, isa: str = "", kv: CacheFormat = "bf16") -> Decoder:
    return load_ours(folder, NativeOps(threads=threads, isa=isa, kv_format=kv), context=LENGTH)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_architecture(name: str, kv: CacheFormat, tiny: Any) -> None:
    folder, theirs = tiny(name)
    ours = load(folder, kv=kv)
    ids = tokens(LENGTH)
    expected = oracle(theirs, ids)
    whole = ours.forward(Batch.extend([(ours.cache(LENGTH), ids)]))
    tolerance = TOLERANCE * (1 if kv == "bf16" else 3)
    if ours.config.sparse:  # between two experts that are close, rounding decides
        errors = np.abs(whole - expected).max(1) / np.abs(expected).max()
        assert np.median(errors) < tolerance
    else:
        assert relative_error(whole, expected) < tolerance
    cache = ours.cache(LENGTH)
    steps = np.concatenate([ours.forward(Batch.extend([(cache, [t])])) for t in ids])
    # The same rows one at a time, bit for bit.
    assert np.array_equal(steps, whole)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_bits_of_every_machine(name: str, tiny: Any, tmp_path: Path) -> None:
    """Those that ``logits.json`` has, whatever the machine; ``code_paths table`` writes it."""
    folder = shutil.copytree(tiny(name)[0], tmp_path / name)
    fill(folder)
    wanted = known()[name]
    best, *others = ISAS
    assert dict(digests(folder, best)) == wanted
    for isa in others:
        assert digest(folder, isa, "int8") == wanted["int8"], isa


@pytest.mark.parametrize("name", ["llama", "deepseek-v2-dense"])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_long_context(kv: CacheFormat, name: str, tiny: Any) -> None:
    """The same for any threads and chunks beyond a block of keys, where the cache is split."""
    ids = tokens(700)
    results = []
    for threads, chunk in ((1, 700), (2, 700), (2, 64), (1, 257)):
        decoder = load(tiny(name)[0], threads=threads, kv=kv)
        cache = decoder.cache(701)
        for start in range(0, 700, chunk):
            decoder.forward(Batch.extend([(cache, ids[start : start + chunk])]), rows=[])
        results.append(decoder.forward(Batch.extend([(cache, [5])])))
    for result in results[1:]:
        assert np.array_equal(result, results[0])


def test_batch_of_sequences(tiny: Any) -> None:
    decoder = load(tiny("llama")[0])
    sequences = [tokens(n, seed=n) for n in (3, 17, 30)]
    caches: list[Any] = [decoder.cache(64) for _ in sequences]
    decoder.forward(Batch.extend([(c, s[:2]) for c, s in zip(caches, sequences, strict=True)]))
    rest = [(c, s[2:]) for c, s in zip(caches, sequences, strict=True)]
    together = decoder.forward(Batch.extend(rest))
    row = 0
    for ids in sequences:
        alone = decoder.forward(Batch.extend([(decoder.cache(64), ids)]))
        assert np.array_equal(together[row : row + len(ids) - 2], alone[2:])
        row += len(ids) - 2
