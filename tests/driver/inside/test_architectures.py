"""Architectures on the driver: a prompt, tokens and trees, against transformers and recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.graph import GraphedForward
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.formats import CODECS, F32, PackedTensor, pack, unpack
from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.reference.ops import TorchOps
from localrt.quantize.quantize import Recipe, quantize_model
from tests.driver.inside.conftest import Kernels
from tests.models.tiny import relative_error, save_tiny, tokens

pytestmark = pytest.mark.gpu

LENGTH = 18  # beyond the window of the windowed configs
SHORT = 4
SLOW = pytest.mark.slow


class Packed:
    """A checkpoint whose matrices are quantized as they are read; or ``restored``, plainly."""

    def __init__(self, inner: Any, format_: str, *, restored: bool = False) -> None:
        self._inner, self._format, self._restored = inner, CODECS[format_].format, restored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def blocks(self, name: str) -> Iterator[Any]:
        whole = self._inner.read(name)
        if len(whole.shape) == 2:
            whole = replace(pack(unpack(whole), self._format), name=name)
            if self._restored:
                values = unpack(whole).view(np.uint8)
                whole = PackedTensor(name, F32, whole.shape, values)
        yield whole


def load(folder: Path, *, ops: Any = None, context: int = 256, packed: bool = False) -> Decoder:
    with closing(open_checkpoint(folder)) as checkpoint:
        source: Any = checkpoint
        if packed:
            source = Packed(checkpoint, "int4-g32", restored=isinstance(ops, TorchOps))
        config = read_config(source, context=context)
        return load_decoder(source, ops or CudaOps(device="cuda"), config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer."""
    path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", path, layers=1)
    return path


@pytest.mark.parametrize(
    ("name", "layers", "length"),
    [
        pytest.param("gemma2", 2, LENGTH, marks=SLOW),
        ("qwen3", 1, SHORT),
        ("phi3-longrope", 1, SHORT),
        ("ministral3", 1, LENGTH),  # queries that grow
        ("olmo2", 1, SHORT),  # no norms before products
        ("apertus", 1, SHORT),  # MLPs without a gate, whose activation is learned
        ("hunyuan", 1, SHORT),  # norms behind the rotation
        ("gemma4", None, LENGTH),  # normed values, shared keys and values, inputs of layers
        ("gemma4-unified", None, LENGTH),  # keys as values
        pytest.param("gemma4-double-wide", None, LENGTH, marks=SLOW),
        pytest.param("gemma4-keys-as-values", None, LENGTH, marks=SLOW),
        pytest.param("gemma4-moe", None, LENGTH, marks=SLOW),  # beside a dense MLP
        ("qwen3.5", 2, 8),  # recurrent layers and gated attention, from here on
        ("lfm3", 2, 8),  # a gate for each head
        ("muse-glimmer", 3, SHORT),  # normed embeddings, a gate for each number
        ("laguna", 2, SHORT),  # softplus gates
        ("afmoe-two", 3, SHORT),  # norms on mixtures' results
        ("olmo-hybrid", 2, 8),  # strengths up to 2
        ("kimi-linear", 2, 8),  # gates and decays of low rank, and latents
        ("nemotron-h-latent", 3, 8),  # layers of one kind, experts without a gate that see less
        ("falcon-h1", None, 8),  # side by side
        pytest.param("gpt-oss", 2, LENGTH, marks=SLOW),  # mixtures: sinks, joint norms, biases
        pytest.param("olmoe", 1, SHORT, marks=SLOW),
        pytest.param("qwen2-moe", 1, SHORT, marks=SLOW),
        ("llama4-text", 3, LENGTH),  # chunks, and weights on experts' inputs
        ("mistral4-text", 2, 8),  # latents and queries that grow
        pytest.param("deepseek-v2-dense", 1, 7, marks=SLOW),
        pytest.param("deepseek-v2-lite-dense", 1, 7, marks=SLOW),
        pytest.param("deepseek-v3-halves", 1, 7, marks=SLOW),
    ],
)
def test_architectures(
    name: str, layers: int | None, length: int, gpu: Kernels, tmp_path: Path
) -> None:
    """A prompt, a token and two more; and back, where bf16 may choose another expert."""
    theirs, ids = save_tiny(name, tmp_path, layers=layers), tokens(length)
    ours = load(tmp_path, context=LENGTH)
    cache = ours.cache(LENGTH)
    parts = [ids[:-3], ids[-3:-2], ids[-2:]]
    got = np.concatenate([ours.forward(Batch.extend([(cache, part)])) for part in parts])
    wanted = theirs.logits(ids)
    off = np.abs(got - wanted).max(1) / np.abs(wanted).max()
    assert np.median(off) < 0.03
    if not ours.config.sparse:
        assert off.max() < 0.06  # weights and activations are bf16
    most = ours.ops.kv_nbytes(ours.config.memory, length)  # states are kept now and then
    assert cache.nbytes <= most if isinstance(cache, HybridCache) else cache.nbytes == most
    if ours.config.sparse:
        return
    held = cache.trim(length - 3)  # recurrent layers go back further
    assert held == length - 3 or isinstance(cache, HybridCache)
    again = ours.forward(Batch.extend([(cache, ids[held:])]))
    assert relative_error(again, got[held:]) < 0.02


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("lfm2", 2),
        ("llama", 1),
        ("gemma4", None),
        pytest.param("gemma4-unified", None, marks=SLOW),
        pytest.param("nemotron-h", 2, marks=SLOW),
        pytest.param("qwen3.5", 2, marks=SLOW),
        pytest.param("deepseek-v2-dense", 1, marks=SLOW),
    ],
)
def test_recorded_trees(name: str, layers: int | None, gpu: Kernels, tmp_path: Path) -> None:
    """Single tokens, trees in two rounds and what is taken back, plainly and from recordings."""
    save_tiny(name, tmp_path, layers=layers)
    decoder = load(tmp_path)
    assert isinstance(decoder.ops, CudaOps)
    recorded = GraphedForward(decoder.ops, decoder.forward)
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    results, checks = [], list[int]()

    def rounds(forward: Any, cache: Any, *sizes: int) -> np.ndarray:
        """A tree's logits; each of ``sizes`` is how many rows there are after a pass."""
        held, found = cache.length, []
        for first, stop in pairwise((0, *sizes)):
            own = mask[first:stop, :stop]
            span = Span(cache, stop - first, own)
            ids = np.array([7, 8, 9, 10])[first:stop]
            found.append(forward(Batch(ids, held + own.sum(1) - 1, (span,))))
        return np.concatenate(found)

    for forward in (decoder.forward, recorded):
        cache = decoder.cache(64)
        results.append([forward(Batch.extend([(cache, tokens(6))]))])
        for turn in range(3):
            mask[2:, 1] = turn == 1
            for token in (5, 6, 7):
                batch = Batch.extend([(cache, [token + turn])])
                results[-1].append(forward(batch, rows=[0], check=lambda: checks.append(1)))
            held = cache.length
            whole = rounds(decoder.forward, cache, 4)
            assert cache.trim(held) == held
            results[-1].append(rounds(forward, cache, 3, 4))
            assert np.array_equal(results[-1][-1], whole)
            cache.select(held, [0, 2])
            cache.trim(cache.length - 1)
    for plain, again in zip(*results, strict=True):
        assert np.array_equal(plain, again)
    assert gpu.launches.count("replay") > 10
    assert len(checks) > 18, "recorded passes can be cancelled"


@pytest.mark.parametrize(
    ("name", "format_", "method"),
    [
        ("llama", "nf4", "rtn"),
        ("llama", "nvfp4", "rtn"),
        ("llama", "mxfp4", "mr-gptq"),  # rotated
        ("qwen3-moe", "nvfp4", "rtn"),
        ("qwen3-moe", "mxfp4", "mr-gptq"),
    ],
)
def test_stores(name: str, format_: str, method: str, gpu: Kernels, tmp_path: Path) -> None:
    """A prompt of more than 64 tokens, and tokens that are replayed: near float32 of their
    values.
    """
    save_tiny(name, tmp_path, layers=1)
    with closing(open_checkpoint(tmp_path)) as source:
        recipe = Recipe(format_, method=method, calibration=tokens(512))
        store = quantize_model(source, tmp_path / "store", recipe, threads=1).path
    ours, plain = load(store), load(store, ops=TorchOps(compute_format="f32"))
    ours_again = GraphedForward(ours.ops, ours.forward)  # type: ignore[arg-type]
    seen = []
    for decoder, forward in ((ours, ours_again), (plain, plain.forward)):
        cache = decoder.cache(80)
        parts = [tokens(66), *([token] for token in tokens(5, seed=1))]
        seen.append(np.concatenate([forward(Batch.extend([(cache, part)])) for part in parts]))
    off = np.abs(seen[0] - seen[1]).max(1) / np.abs(seen[1]).max()
    assert np.median(off) < 0.03
    assert gpu.launches.count("replay") == 4


@pytest.mark.parametrize("name", ["llama", "deepseek-v2-dense"])
def test_long_prompts_in_parts(name: str, gpu: Kernels, tmp_path: Path) -> None:
    """Near float32; the same bits however a prompt is cut, in parts of more than 64 tokens; and
    sequences that share a pass.
    """
    save_tiny(name, tmp_path, layers=1)
    ids = tokens(136)
    ours = load(tmp_path, packed=True)
    plain = load(tmp_path, ops=TorchOps(compute_format="f32"), packed=True)
    whole = ours.forward(Batch.extend([(ours.cache(140), ids)]))
    wanted = plain.forward(Batch.extend([(plain.cache(140), ids)]))
    assert relative_error(whole, wanted) < 0.03
    one, two = ours.cache(140), ours.cache(140)
    parts = [ours.forward(Batch.extend([(one, part)])) for part in (ids[:67], ids[67:])]
    assert np.array_equal(whole, np.concatenate(parts))
    assert one.trim(132) == 132
    both = ours.forward(Batch.extend([(one, ids[132:]), (two, ids[:3])]))
    assert relative_error(both, np.concatenate([whole[132:], whole[:3]])) < 0.02


def test_recordings_keep_no_cache(gpu: Kernels, llama: Path) -> None:
    decoder = load(llama)
    forward = GraphedForward(decoder.ops, decoder.forward)  # type: ignore[arg-type]
    cache = decoder.cache(LENGTH)
    for token in tokens(3):
        forward(Batch.extend([(cache, [token])]))
    assert "replay" in gpu.launches
    kept = weakref.ref(cache)
    del cache
    gc.collect()
    assert kept() is None


def test_keys_and_values_in_int8(gpu: Kernels, llama: Path) -> None:
    """A prompt, single tokens, and a cache that holds what the memory account says."""
    ids = tokens(SHORT + 2)
    results = []
    for format_ in ("bf16", "int8"):
        decoder = load(llama, ops=CudaOps(device="cuda", kv_format=format_))
        cache = decoder.cache(LENGTH)
        parts = [decoder.forward(Batch.extend([(cache, part)])) for part in (ids[:-1], ids[-1:])]
        assert cache.nbytes == decoder.ops.kv_nbytes(decoder.config.attention, len(ids))
        results.append((np.concatenate(parts), cache.nbytes))
    assert results[1][1] < 0.7 * results[0][1]
    assert 0 < relative_error(results[1][0], results[0][0]) < 0.02


def test_fine_activations(gpu: Kernels, llama: Path) -> None:
    """They lose no more than bf16: what is left are the steps between the products."""
    kinds = (TorchOps(compute_format="f32"), CudaOps(device="cuda", fine=True), None)
    wanted, fine, eight = (
        decoder.forward(Batch.extend([(decoder.cache(LENGTH), tokens(SHORT))]))
        for decoder in (load(llama, ops=ops, packed=True) for ops in kinds)
    )
    assert relative_error(fine, wanted) < min(0.01, relative_error(eight, wanted) / 2)
