"""Adapters on the driver: what a GPU adds, and that others' bits stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import OptionError
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.graph import GraphedForward
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.tensor import BFLOAT16, upload
from localrt.quant.ops.adapters import Adapter, LowRank, Mix
from localrt.quant.ops.protocol import Batch, Forward
from localrt.quant.reference.ops import TorchOps
from tests.driver.inside.conftest import Kernels
from tests.driver.inside.test_architectures import Packed
from tests.models.test_adapters import KINDS, Tiny, cache, run
from tests.models.tiny import relative_error, tokens

pytestmark = pytest.mark.gpu

SEVERAL = ("lora", "dora", "ranks")


def on_gpu(tiny: Tiny, *adapters: Adapter[LowRank]) -> Decoder:
    source: Any = Packed(tiny.checkpoint, "int8-g32")
    decoder = load_decoder(source, CudaOps(device="cuda"), read_config(tiny.checkpoint))
    table = decoder.ops.adapters
    assert table is not None
    for adapter in adapters:
        table.add(table.packed(adapter))
    return decoder


@pytest.mark.parametrize("kind", ["dora", "ranks", "tokens"])
def test_a_gpu_adds_what_torch_does(kind: str, gpu: Kernels, tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapter, _ = tiny.adapter("a", **KINDS[kind])
    ids = tokens(4)
    exact = tiny.decoder(TorchOps(compute_format="f32"), adapter)
    decoder = on_gpu(tiny, adapter)
    plain = relative_error(run(decoder, cache(decoder), ids), run(exact, cache(exact), ids))
    wanted = run(exact, cache(exact, adapter), ids)
    assert relative_error(run(decoder, cache(decoder, adapter), ids), wanted) < max(3 * plain, 2e-2)


def test_long_passes_and_recordings(gpu: Kernels, tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapter, _ = tiny.adapter("a", 1)
    decoder = on_gpu(tiny, adapter)
    ids = tokens(66)
    whole, long = decoder.cache(80), decoder.cache(80)
    whole.mix = long.mix = ((adapter.key, 1.0),)
    wanted = run(decoder, whole, ids[:60])
    rest = run(decoder, whole, ids[60:])
    got = run(decoder, long, ids)  # a prompt's rows
    assert relative_error(got[60:], rest) < 4e-2
    assert relative_error(got[:60], wanted) < 4e-2

    forward = GraphedForward(decoder.ops, decoder.forward)  # type: ignore[arg-type]
    made, adapted = cache(decoder), cache(decoder, adapter)
    before = [forward(Batch.extend([(made, [5])]))]
    forward(Batch.extend([(adapted, [5])]))
    for _ in range(3):  # the second time it is recorded
        made.trim(0)
        before.append(forward(Batch.extend([(made, [5])])))
        adapted.trim(0)
        again = forward(Batch.extend([(adapted, [5])]))
        assert relative_error(again, before[0]) > 1e-3
    for each in before[1:]:
        np.testing.assert_array_equal(each, before[0])
    decoder.ops.adapters.remove(adapter.key)  # type: ignore[union-attr]
    np.testing.assert_array_equal(run(decoder, cache(decoder), [5]), before[0])


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
    decoder = on_gpu(tiny, *adapters)
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
    decoder, wanted = on_gpu(tiny, first, second), list[list[np.ndarray]]()
    table = decoder.ops.adapters
    assert table is not None
    forward = GraphedForward(decoder.ops, decoder.forward)  # type: ignore[arg-type]
    mixes: list[Mix] = [((each.key, 1.0),) for each in (second, third)]
    for mix in ((), mixes[0]):
        wanted.append(turns(decoder, decoder.forward, [mix], together=True))
    for mix in ((), ((first.key, 1.0),)):
        for _ in range(2):
            turns(decoder, forward, [mix], together=True)
    device, kept = device_of(decoder.ops.device), set[int]()
    for part in table._known[first.key].matrices.values():
        kept |= {part.a.address, part.b.address}
    table.remove(first.key)
    poison = [np.full(64, 0x7FC0, np.uint16) for _ in range(400)]  # where its numbers were
    options = {"dtype": BFLOAT16, "pool": device.persistent}
    held = [upload(each, device, **options) for each in poison]
    assert kept & {each.address for each in held}
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


def test_more_adapters_than_places(gpu: Kernels, tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapters = [tiny.adapter(f"a{n}", n)[0] for n in range(3)]
    decoder = on_gpu(tiny, *adapters)
    forward = GraphedForward(decoder.ops, decoder.forward)  # type: ignore[arg-type]
    weights = (0.25, 0.5, 1.0, 2.0)
    mixes: list[Mix] = [((each.key, weight),) for each in adapters for weight in weights]
    for some in (mixes[:2], mixes[:4], mixes[4:8], mixes[8:], mixes, mixes[:2], mixes[5:9]):
        wanted = turns(decoder, decoder.forward, some, together=False)
        assert all(map(np.array_equal, turns(decoder, forward, some, together=True), wanted))
