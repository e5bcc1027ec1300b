"""Whole tiny models on the CUDA kernels: oracles, packed weights, trees, recorded passes."""

from __future__ import annotations

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
from localrt.quant.cuda import cublas
from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.graph import GraphedForward
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.routing import CudaRouting
from localrt.quant.formats import CODECS, pack, unpack
from localrt.quant.formats.tiled import TiledTensor, tile_tensor
from localrt.quant.methods.rotation import block_hadamard
from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import oracle, relative_error, save_tiny, tokens
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE

LENGTH = 18  # beyond the window of the windowed configs
SHORT = 4


class Packed:
    """A checkpoint whose matrices are quantized as they are read; with ``rotated``, as a store."""

    def __init__(self, inner: Any, format_: str, rotated: int = 0) -> None:
        self._inner, self._codec, self._rotated = inner, CODECS[format_], rotated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def blocks(self, name: str) -> Iterator[Any]:
        whole = self._inner.read(name)
        fits = len(whole.shape) == 2 and whole.shape[1] % max(self._codec.format.block, 32) == 0
        if not fits:
            yield whole
            return
        if self._rotated and "embed" not in name:
            turned = block_hadamard(unpack(whole), self._rotated)
            packed = replace(pack(turned, self._codec.format), name=name)
            yield tile_tensor(packed, hadamard=self._rotated)
            return
        packed = replace(pack(unpack(whole), self._codec.format), name=name)
        # Blocks that do not end with a tile.
        for rows in np.array_split(np.arange(whole.shape[0]), 3):
            yield packed.take_rows(rows)


class Restored(Packed):
    """The same numbers, plainly."""

    def blocks(self, name: str) -> Iterator[Any]:
        from localrt.quant.formats import F32, PackedTensor
        from localrt.quant.formats.tiled import untile

        for block in super().blocks(name):
            plain = untile(block) if isinstance(block, TiledTensor) else block
            values = unpack(plain)
            if isinstance(block, TiledTensor):
                values = block_hadamard(values, block.hadamard)
            data = values.reshape(-1, values.shape[-1]).view(np.uint8)
            yield PackedTensor(name, F32, block.shape, data)


def load(folder: Path, wrap: Any = None, ops: Any = None, *, context: int = 256) -> Decoder:
    with closing(open_checkpoint(folder)) as checkpoint:
        source: Any = checkpoint if wrap is None else wrap(checkpoint)
        config = read_config(source, context=context)
        return load_decoder(source, ops or CudaOps(device=str(DEVICE)), config)


def shallow(folder: Path, wrap: Any = None, ops: Any = None) -> Decoder:
    """Only the first layer: enough where two ways of running a model are compared."""
    decoder = load(folder, wrap, ops)
    del decoder.weights.body[3:]  # the embedding, attention and MLP
    return decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", path, layers=1)  # of which ``shallow`` keeps one
    return path


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "layers", "length"),
    [
        pytest.param("gemma2", 2, LENGTH, marks=SLOW),
        ("qwen3", 1, SHORT),
        ("phi3-longrope", 1, SHORT),
        ("ministral3", 1, LENGTH),  # queries that grow
        ("olmo2", 1, SHORT),  # no norms before products
        ("hunyuan", 1, SHORT),  # norms behind the rotation
        ("qwen3.5", 2, 8),  # recurrent layers and gated attention, from here on
        ("lfm3", 2, 8),  # a gate for each head
        ("olmo-hybrid", 2, 8),  # strengths up to 2
        ("kimi-linear", 2, 8),  # gates and decays of low rank, and latents
        ("nemotron-h-latent", 3, 8),  # layers of one kind, experts without a gate that see less
        ("falcon-h1", None, 8),  # side by side
        pytest.param("gpt-oss", 2, LENGTH, marks=SLOW),  # mixtures: sinks, joint norms, biases
        pytest.param("olmoe", 1, SHORT, marks=SLOW),
        pytest.param("qwen2-moe", 1, SHORT, marks=SLOW),
        pytest.param("deepseek-v2-dense", 1, 7, marks=SLOW),
        pytest.param("deepseek-v2-lite-dense", 1, 7, marks=SLOW),
        pytest.param("deepseek-v3-halves", 1, 7, marks=SLOW),
    ],
)
def test_architectures(name: str, layers: int | None, length: int, tmp_path: Path) -> None:
    """A prompt, a token and two more; and back, where bf16 may choose another expert."""
    theirs, ids = save_tiny(name, tmp_path, layers=layers), tokens(length)
    ours = load(tmp_path, context=LENGTH)
    cache = ours.cache(LENGTH)
    parts = [ids[:-3], ids[-3:-2], ids[-2:]]
    got = np.concatenate([ours.forward(Batch.extend([(cache, part)])) for part in parts])
    wanted = oracle(theirs, ids)
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
    [("qwen3.5", 2), ("nemotron-h", 2), ("lfm2", 2), ("llama", 1), ("deepseek-v2-dense", 1)],
)
def test_recorded_trees(name: str, layers: int, tmp_path: Path) -> None:
    """Single tokens, trees in two rounds and what is taken back, plainly and from recordings."""
    save_tiny(name, tmp_path, layers=layers)
    decoder = load(tmp_path)
    assert isinstance(decoder.ops, CudaOps)
    recorded = GraphedForward(decoder.ops, decoder.forward)
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    results = []

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
                results[-1].append(forward(Batch.extend([(cache, [token + turn])]), rows=[0]))
            held = cache.length
            whole = rounds(decoder.forward, cache, 4)
            assert cache.trim(held) == held
            results[-1].append(rounds(forward, cache, 3, 4))
            assert np.array_equal(results[-1][-1], whole)
            cache.select(held, [0, 2])
            cache.trim(cache.length - 1)
    for plain, again in zip(*results, strict=True):
        assert np.array_equal(plain, again)
    seen = recorded._recordings._seen
    shapes = [shape for shape, each in seen.items() if each.static is not None]
    filled = 4 if name in ("llama", "deepseek-v2-dense") else 3  # states have no rows to spare
    wanted = {(1, False), (filled, True), (1, True)}
    assert {(shape.rows, shape.columns > 0) for shape in shapes} == wanted


def test_keys_and_values_in_int8(folder: Path) -> None:
    """A prompt, single tokens, and a cache that holds what the memory account says."""
    ids = tokens(SHORT + 2)
    exact, small = (
        load(folder, ops=CudaOps(device=str(DEVICE), kv_format=f)) for f in ("bf16", "int8")
    )
    results = []
    for decoder in (exact, small):
        cache = decoder.cache(LENGTH)
        parts = [decoder.forward(Batch.extend([(cache, ids[:-1])]))]
        parts.append(decoder.forward(Batch.extend([(cache, ids[-1:])])))
        assert cache.nbytes == decoder.ops.kv_nbytes(decoder.config.attention, len(ids))
        results.append((np.concatenate(parts), cache.nbytes))
    assert results[1][1] < 0.7 * results[0][1]
    assert 0 < relative_error(results[1][0], results[0][0]) < 0.02


def test_fine_activations_lose_no_more_than_bf16(folder: Path) -> None:
    ids = tokens(SHORT)
    batch = Batch.extend
    wanted, fine, eight = (
        decoder.forward(batch([(decoder.cache(LENGTH), ids)]))
        for decoder in (
            load(folder, lambda inner: Restored(inner, "int4-g32"), TorchOps(compute_format="f32")),
            load(
                folder,
                lambda inner: Packed(inner, "int4-g32"),
                CudaOps(device=str(DEVICE), fine=True),
            ),
            load(folder, lambda inner: Packed(inner, "int4-g32")),
        )
    )
    # What is left are the steps between the products, in bf16.
    assert relative_error(fine, wanted) < min(0.01, relative_error(eight, wanted) / 2)


@pytest.mark.slow
@pytest.mark.parametrize(("format_", "counts"), [("int4-g32m", (5, 75)), ("nvfp4", (5,))])
def test_packed_experts_are_computed_together(
    format_: str, counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as in a model of the same numbers, for a few rows and for many."""
    save_tiny("qwen3-moe", tmp_path)
    ours = shallow(tmp_path, lambda c: Packed(c, format_))
    plain = shallow(tmp_path, lambda c: Restored(c, format_), TorchOps(compute_format="f32"))
    monkeypatch.setattr(CudaOps, "expert_apart", None)
    ids = tokens(75)
    for count in counts:
        got = ours.forward(Batch.extend([(ours.cache(80), ids[:count])]))
        wanted = plain.forward(Batch.extend([(plain.cache(80), ids[:count])]))
        off = np.abs(got - wanted).max(1) / np.abs(wanted).max()
        assert np.median(off) < 0.03


@pytest.mark.parametrize(
    ("format_", "rotated"),
    [pytest.param("int4-g32m", 0, marks=pytest.mark.slow), ("nvfp4", 0), ("nf4", 0), ("mxfp4", 32)],
)
def test_packed_weights(folder: Path, format_: str, rotated: int) -> None:
    """nf4 does not fit every matrix: those are bf16."""
    ids = tokens(SHORT)
    ours = shallow(folder, lambda c: Packed(c, format_, rotated))
    plain = shallow(folder, lambda c: Restored(c, format_, rotated), TorchOps(compute_format="f32"))
    got = ours.forward(Batch.extend([(ours.cache(LENGTH), ids)]))
    wanted = plain.forward(Batch.extend([(plain.cache(LENGTH), ids)]))
    assert relative_error(got, wanted) < 0.03


@pytest.mark.parametrize("format_", ["bf16", "int4-g32"])
def test_gpu_without_bf16(folder: Path, format_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "multiplies", lambda device: False)
    packed = format_ != "bf16"
    decoder = shallow(folder, (lambda c: Packed(c, format_)) if packed else (lambda c: c))
    ids = tokens(70)
    long = decoder.forward(Batch.extend([(decoder.cache(72), ids)]))
    cache = decoder.cache(72)
    parts = [decoder.forward(Batch.extend([(cache, part)])) for part in (ids[:60], ids[60:])]
    assert relative_error(long, np.concatenate(parts)) < 0.02


def test_prompts_in_parts(folder: Path) -> None:
    """The same bits however a prompt is cut, in parts of more than 64 tokens."""
    decoder = shallow(folder, lambda c: Packed(c, "int4-g32"))
    ids = tokens(136)
    whole = decoder.forward(Batch.extend([(decoder.cache(136), ids)]))
    cache = decoder.cache(136)
    parts = [decoder.forward(Batch.extend([(cache, part)])) for part in (ids[:67], ids[67:])]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.skipif(DEVICE.is_gpu, reason="launches are counted on the CPU")
def test_launches_of_a_layer(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, layers=1)  # heads of whole steps
    decoder = shallow(tmp_path, lambda c: Packed(c, "int4-g32"))
    cache = decoder.cache(LENGTH)
    decoder.forward(Batch.extend([(cache, tokens(SHORT))]))
    counter = Emulator()
    before = emulate(counter)
    decoder.forward(Batch.extend([(cache, tokens(1))]))
    emulate(before)
    names = [program.name for program in counter.launches]
    assert names.pop(3) == "rotary"  # of the first layer alone
    attention = ["rms_norm", "linear", "rope_append", "attention", "attention_join", "linear"]
    mlp = ["rms_norm", "linear", "quantize", "linear"]
    assert names == [
        "unpack",
        *attention,
        *mlp,
        "rms_norm",
        "linear",
    ]  # ten, and embedding and head


@pytest.mark.slow
def test_prefill_decode_and_batches_agree(folder: Path) -> None:
    """Long passes unpack their weights; short ones, and several sequences, do not."""
    decoder = shallow(folder, lambda c: Packed(c, "int4-g32"))
    ids = tokens(72)
    caches = [decoder.cache(128), decoder.cache(128)]
    for cache, count in zip(caches, (70, 10), strict=True):
        decoder.forward(Batch.extend([(cache, ids[:count])]), rows=[])
    both = decoder.forward(
        Batch.extend([(caches[0], ids[70:]), (caches[1], ids[10:13])]), rows=[1, 4]
    )
    assert [cache.length for cache in caches] == [72, 13]
    for got, count in zip(both, (72, 13), strict=True):
        alone = decoder.forward(Batch.extend([(decoder.cache(128), ids[:count])]), rows=[count - 1])
        assert relative_error(got, alone[0]) < 0.03


@pytest.mark.slow
def test_recorded_passes_are_the_passes(folder: Path) -> None:
    decoder = shallow(folder)
    assert isinstance(decoder.ops, CudaOps)
    forward = GraphedForward(decoder.ops, decoder.forward)
    ids = tokens(12)
    plain, graphed = decoder.cache(300), decoder.cache(300)
    for cache in (plain, graphed):
        decoder.forward(Batch.extend([(cache, ids[:6])]), rows=[])
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1

    for token in ids[6:10]:  # plainly, recorded, replayed, replayed
        wanted = decoder.forward(Batch.extend([(plain, [token])]), rows=[0])
        got = forward(Batch.extend([(graphed, [token])]), rows=[0], check=check)
        assert np.array_equal(got, wanted)
        assert graphed.length == plain.length
    assert calls
    # What is recorded serves a cache that has grown.
    graphed.reserve(300)
    for token in ids[10:]:
        wanted = decoder.forward(Batch.extend([(plain, [token])]), rows=[0])
        assert np.array_equal(forward(Batch.extend([(graphed, [token])]), rows=[0]), wanted)


def test_a_mixture_on_a_gpu_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never sees who was chosen."""
    save_tiny("qwen3-moe", tmp_path)
    assert not shallow(tmp_path).weights.experts[0].capturable  # bf16: each expert by itself
    decoder = shallow(tmp_path, lambda c: Packed(c, "int4-g32m"))
    assert decoder.weights.experts[0].capturable
    assert isinstance(decoder.ops, CudaOps)
    monkeypatch.setattr(CudaRouting, "_read", None)
    forward = GraphedForward(decoder.ops, decoder.forward)
    plain, graphed = decoder.cache(64), decoder.cache(64)
    for token in tokens(3):  # plainly, recorded, replayed
        wanted = decoder.forward(Batch.extend([(plain, [token])]), rows=[0])
        assert np.array_equal(forward(Batch.extend([(graphed, [token])]), rows=[0]), wanted)


def test_memory_estimates_are_what_is_taken(folder: Path) -> None:
    decoder = shallow(folder, lambda c: Packed(c, "int4-g32"))
    ops, weights = decoder.ops, decoder.weights.body[1].parts[-1].layer.weights
    form = CODECS["int4-g32"].format
    assert weights.qkv.nbytes == ops.weight_nbytes((128, 64), form) == 128 * form.row_bytes(64)
    cache = decoder.cache(100)
    decoder.forward(Batch.extend([(cache, [1, 2, 3])]), rows=[])
    assert cache.nbytes == ops.kv_nbytes(decoder.config.attention, 3)
