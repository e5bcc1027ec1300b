"""Architectures and adapters on the driver: prompts, tokens and trees, recorded, and against
transformers and torch.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import OptionError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.graph import GraphedForward
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.formats import CODECS, F32, PackedTensor, pack, unpack
from localrt.quant.ops.adapters import Adapter, LowRank, Mix
from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.ops.protocol import Batch, Forward
from localrt.quant.reference.ops import TorchOps
from tests.driver.inside.conftest import Kernels, quantized
from tests.models.test_adapters import KINDS, Tiny, cache, run
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
        ("hunyuan", 1, SHORT),  # norms behind the rotation
        ("qwen3.5", 2, 8),  # recurrent layers and gated attention
        ("mistral4-text", 2, 8),  # latents and queries that grow
        *(
            pytest.param(*case, marks=SLOW)
            for case in [
                ("gemma4", None, LENGTH),  # normed and shared values, inputs of layers
                ("qwen3", 1, SHORT),  # norms of heads
                ("phi3-longrope", 1, SHORT),
                ("olmo2", 1, SHORT),  # no norms before products
                ("apertus", 1, SHORT),  # MLPs without a gate, whose activation is learned
                ("gemma4-unified", None, LENGTH),  # keys as values
                ("gemma4-moe", None, LENGTH),  # beside a dense MLP
                ("lfm3", 2, 8),  # a gate for each head
                ("muse-glimmer", 3, SHORT),  # normed embeddings, a gate for each number
                ("laguna", 2, SHORT),  # softplus gates
                ("afmoe-two", 3, SHORT),  # norms on mixtures' results
                ("olmo-hybrid", 2, 8),  # strengths up to 2
                ("kimi-linear", 2, 8),  # gates and decays of low rank, and latents
                ("nemotron-h-latent", 3, 8),  # experts without a gate that see less
                ("falcon-h1", None, 8),  # side by side
                ("gpt-oss", 2, LENGTH),  # sinks, joint norms, biases
                ("qwen2-moe", 1, SHORT),  # an expert for every token
                ("llama4-text", 3, LENGTH),  # chunks, and weights on experts' inputs
                ("deepseek-v3-halves", 1, 7),  # rotation by halves
            ]
        ),
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
    ("name", "format_", "method"),
    [
        ("llama", "mxfp4", "mr-gptq"),  # rotated
        pytest.param("llama", "nf4", "rtn", marks=SLOW),
        pytest.param("qwen3-moe", "nvfp4", "rtn", marks=SLOW),
    ],
)
def test_stores(name: str, format_: str, method: str, gpu: Kernels, tmp_path: Path) -> None:
    """A prompt of more than 64 tokens, and tokens that are replayed: near float32 of their
    values.
    """
    save_tiny(name, tmp_path, layers=1)
    store = quantized(tmp_path, format_, method=method, calibration=tokens(512))
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


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek-v2-dense", marks=SLOW)])
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


# -- adapters --------------------------------------------------------------------------------------

SEVERAL = ("lora", "dora", "ranks")


def adapted(tiny: Tiny, *adapters: Adapter[LowRank]) -> Decoder:
    source: Any = Packed(tiny.checkpoint, "int8-g32")
    decoder = load_decoder(source, CudaOps(device="cuda"), read_config(tiny.checkpoint))
    table = decoder.ops.adapters
    assert table is not None
    for adapter in adapters:
        table.add(table.packed(adapter))
    return decoder


@pytest.mark.parametrize("kind", [pytest.param("dora", marks=SLOW), "tokens"])
def test_a_gpu_adds_what_torch_does(kind: str, gpu: Kernels, tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapter, _ = tiny.adapter("a", **KINDS[kind])
    ids = tokens(4)
    exact = tiny.decoder(TorchOps(compute_format="f32"), adapter)
    decoder = adapted(tiny, adapter)
    plain = relative_error(run(decoder, cache(decoder), ids), run(exact, cache(exact), ids))
    wanted = run(exact, cache(exact, adapter), ids)
    assert relative_error(run(decoder, cache(decoder, adapter), ids), wanted) < max(3 * plain, 2e-2)


def turns(
    decoder: Decoder, forward: Forward, mixes: list[Mix], *, together: bool
) -> list[np.ndarray]:
    """What sequences with these adapters are told in four turns, by passes over all or one."""
    caches = [decoder.cache(64) for _ in mixes]
    for made, mix in zip(caches, mixes, strict=True):
        made.mix = mix
    seen = list[np.ndarray]()
    for turn in range(4):
        batches = [(made, [7 * turn + place]) for place, made in enumerate(caches)]
        groups = [batches] if together else [[each] for each in batches]
        seen.append(np.concatenate([forward(Batch.extend(group)) for group in groups]))
    return seen


def test_recorded_passes(gpu: Kernels, tmp_path: Path) -> None:
    """To the bits of others, whatever adapters the sequences have, and one recording for all."""
    tiny = Tiny("qwen2", tmp_path)
    adapters = [tiny.adapter(f"a{n}", n, **KINDS[kind])[0] for n, kind in enumerate(SEVERAL)]
    decoder = adapted(tiny, *adapters)
    forward = GraphedForward(decoder.ops, decoder.forward)  # type: ignore[arg-type]
    one, two, three = (((each.key, 1.0),) for each in adapters)
    mixed = ((adapters[0].key, 0.5), (adapters[1].key, 2.0))
    chosen: list[list[Mix]] = [
        [one], [two], [mixed], [(), one, two, mixed, three], [one, one, (), one, three],
    ]  # fmt: skip
    for mixes in chosen:
        wanted = turns(decoder, decoder.forward, mixes, together=False)
        for again in range(2):
            gpu.launches.clear()
            seen = turns(decoder, forward, mixes, together=True)
            assert all(map(np.array_equal, seen, wanted))
            assert again == 0 or gpu.launches == ["replay"] * 4


def test_adapters_that_are_removed(gpu: Kernels, tmp_path: Path) -> None:
    """Nothing of them is read by what was recorded with them, nor of others in their place."""
    tiny = Tiny("qwen2", tmp_path)
    first, second, third = (tiny.adapter(label, n)[0] for n, label in enumerate("abc"))
    decoder, wanted = adapted(tiny, first, second), list[list[np.ndarray]]()
    table = decoder.ops.adapters
    assert table is not None
    forward = GraphedForward(decoder.ops, decoder.forward)  # type: ignore[arg-type]
    mixes: list[Mix] = [((each.key, 1.0),) for each in (second, third)]
    for mix in ((), mixes[0]):
        wanted.append(turns(decoder, decoder.forward, [mix], together=True))
    for mix in ((), ((first.key, 1.0),)):
        for _ in range(2):
            turns(decoder, forward, [mix], together=True)
    table.remove(first.key)
    with pytest.raises(OptionError, match="was removed"):
        turns(decoder, forward, [((first.key, 1.0),)], together=True)
    for mix, logits in zip(((), mixes[0]), wanted, strict=True):
        gpu.launches.clear()
        assert all(map(np.array_equal, turns(decoder, forward, [mix], together=True), logits))
        assert gpu.launches == ["replay"] * 4
    table.add(table.packed(third))
    wanted_of_third = turns(decoder, decoder.forward, [mixes[1]], together=True)
    seen = turns(decoder, forward, [mixes[1], mixes[0]], together=True)
    assert all(np.array_equal(s[:1], w) for s, w in zip(seen, wanted_of_third, strict=True))
