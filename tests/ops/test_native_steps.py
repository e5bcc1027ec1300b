"""The fused steps on whole tiny models: transformers as the oracle, and batch invariance."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv import CacheFormat
from localrt.quant.ops.protocol import Batch, Span
from tests.models.tiny import CONFIGS, oracle, relative_error, tokens
from tests.ops.code_paths import KV_FORMATS, logits
from tests.ops.test_native_matmul import ISAS

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")

# Weights are float32 here: what remains is the cache, which is bf16.
TOLERANCE = 0.03
LENGTH = 40


def load(folder: Path, *, threads: int = 2, isa: str = "", kv: CacheFormat = "bf16") -> Decoder:
    with closing(open_checkpoint(folder)) as checkpoint:
        config = read_config(checkpoint, context=LENGTH)
        ops = NativeOps(threads=threads, isa=isa, kv_format=kv)
        return load_decoder(checkpoint, ops, config)


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


@pytest.fixture
def folder(tiny: Any) -> Path:
    path: Path = tiny("llama")[0]
    return path


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_instruction_set_gives_the_same_bits(name: str, tiny: Any) -> None:
    kinds: tuple[CacheFormat, ...] = KV_FORMATS if name == "llama" else ("int8",)
    for kv in kinds:
        best, *others = (logits(tiny(name)[0], isa, kv) for isa in ISAS)
        for other in others:
            np.testing.assert_array_equal(other, best)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_long_contexts_are_the_same_for_any_threads_and_chunks(
    kv: CacheFormat, folder: Path
) -> None:
    """Beyond one block of keys, where work is split over the cache."""
    ids = tokens(700)
    results = []
    for threads, chunk in ((1, 700), (2, 700), (2, 64), (1, 257)):
        decoder = load(folder, threads=threads, kv=kv)
        cache = decoder.cache(701)
        for start in range(0, 700, chunk):
            decoder.forward(Batch.extend([(cache, ids[start : start + chunk])]), rows=[])
        results.append(decoder.forward(Batch.extend([(cache, [5])])))
    for result in results[1:]:
        assert np.array_equal(result, results[0])


def test_sequences_of_a_batch_do_not_touch_each_other(folder: Path) -> None:
    decoder = load(folder)
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


def test_a_tree_equals_its_branches(folder: Path) -> None:
    decoder = load(folder)
    prompt = tokens(20)
    nodes, parents = [5, 6, 7, 8, 9], [-1, 0, 0, 2, 1]
    mask = np.eye(5, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    cache = decoder.cache(64)
    decoder.forward(Batch.extend([(cache, prompt)]), rows=[])
    positions = len(prompt) + mask.sum(1) - 1
    tree = decoder.forward(Batch(np.array(nodes), positions, (Span(cache, 5, mask),)))
    for path in ([0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]):
        branch = prompt + [nodes[i] for i in path]
        alone = decoder.forward(Batch.extend([(decoder.cache(64), branch)]), rows=[len(branch) - 1])
        assert relative_error(tree[path[-1]], alone[0]) < 1e-5


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_trim_and_growth_leave_no_trace(folder: Path, kv: CacheFormat) -> None:
    decoder = load(folder, kv=kv)
    ids = tokens(300)
    cache = decoder.cache(600)
    decoder.forward(Batch.extend([(cache, ids[:250])]), rows=[])
    decoder.forward(Batch.extend([(cache, tokens(40, seed=9))]), rows=[])
    cache.trim(250)
    grown = decoder.forward(Batch.extend([(cache, ids[250:])]))
    fresh = decoder.forward(Batch.extend([(decoder.cache(600), ids)]))
    assert np.array_equal(grown, fresh[250:])


def test_an_int8_cache_takes_what_was_estimated_and_about_half(folder: Path) -> None:
    sizes = {}
    for kv in ("bf16", "int8"):
        decoder = load(folder, kv=kv)
        cache = decoder.cache(300)
        cache.reserve(300)
        assert cache.nbytes == decoder.ops.kv_nbytes(decoder.config.attention, 300)
        sizes[kv] = cache.nbytes
    assert sizes["int8"] < 0.65 * sizes["bf16"]  # heads of 16 here: the scales are a quarter
