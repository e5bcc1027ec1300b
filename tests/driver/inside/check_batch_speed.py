"""What chats at once and adapters cost in virtual time: passes of a model with the layers and, at
a scale, the bytes of Qwen2.5 1.5B, all of it on the GPU.

Passes alone: what the host does between them is not counted. Adapters cost their bytes, 4 % of the
weights' each, and a fixed time of each product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from localrt.models.registry import load_decoder
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.adapters import Mix
from localrt.quant.ops.protocol import Batch
from tests.driver.inside.check_models import adapter_of
from tests.driver.inside.check_schedule import CI, card, rtx_4060
from tests.driver.inside.conftest import Kernels, once
from tests.driver.standin import Driver
from tests.driver.virtual_time import Machine, virtual_time
from tests.offload.placed import Model, needs_kernels, pack_synthetic

pytestmark = [needs_kernels, once]

LAYERS = 28
NBYTES = 0.87e9  # of int4-g32: all layers and the head
ADAPTER_NBYTES = 37e6  # in bf16, of rank 16, of all matrices
PRODUCTS = 4 * LAYERS  # that apply it
PASSES = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    sizes = {"vocab": 1024, "layers": LAYERS, "hidden": 128, "inner": 768}
    folder = pack_synthetic(tmp_path_factory.mktemp("1.5b"), formats={"": "int4-g32"}, **sizes)
    with closing(Model(folder)) as model:
        yield model


class Timed:
    """The model in virtual time, with eight adapters of all matrices."""

    def __init__(self, model: Model, gpu: Kernels, machine: Machine) -> None:
        self._ops, self._gpu, self._machine = CudaOps(device="cuda"), gpu, machine
        self._decoder = load_decoder(model.store, self._ops, model.config)
        table: Any = self._ops.adapters
        self.own: list[Mix] = [((f"a{n}", 1.0),) for n in range(8)]
        for ((key, _),) in self.own:
            table.add(table.packed(adapter_of(model, key, ends=False)))

    def rate(self, mixes: Sequence[Mix], *, recorded: bool = True) -> tuple[float, int]:
        """Tokens a second of chats with these adapters, and launches of a pass, once all that will
        be recorded is.
        """
        decoder = self._decoder
        forward = self._ops.graphed(decoder.forward) if recorded else decoder.forward
        caches = [decoder.cache(40) for _ in mixes]
        for cache, mix in zip(caches, mixes, strict=True):
            cache.mix = mix
        nbytes = ADAPTER_NBYTES * len({mix for mix in mixes if mix}) / PRODUCTS
        with virtual_time(replace(self._machine, adapters=nbytes), lambda name: 0) as time:
            for number in range(2 + PASSES):
                if number == 2:
                    begin = time.now
                    self._gpu.launches.clear()
                forward(Batch.extend([(cache, [number]) for cache in caches]))
            seconds = (time.now - begin) / PASSES
        return len(mixes) / seconds, len(self._gpu.launches) // PASSES


CARDS = {"H100": card(49e9), "4060": rtx_4060(50e9)}


@pytest.mark.parametrize(
    ("name", "kept"),
    [("H100", (0.9, 0.9, 0.79)), pytest.param("4060", (0.94, 0.94, 0.76), marks=CI)],
)
def test_chats_and_adapters(
    model: Model, driver: Driver, gpu: Kernels, name: str, kept: tuple[float, ...]
) -> None:
    """Eight chats make more than three times the tokens of one. ``kept`` of them are left with an
    adapter: of one chat, of eight with the same one, and of eight with one each. Adapters are no
    kernels more. Step by step, chats lose.
    """
    nbytes = sum(unit.nbytes for unit in model.store.manifest.units)
    driver.idle(True)
    try:
        timed = Timed(model, gpu, replace(CARDS[name], scale=NBYTES / nbytes))
        one, several = timed.rate([()]), timed.rate([()] * 8)
        adapted = [timed.rate(mixes) for mixes in (timed.own[:1], timed.own[:1] * 8, timed.own)]
        steps = timed.rate([()] * 8, recorded=False), timed.rate(timed.own[:1], recorded=False)
    finally:
        driver.idle(False)
    launches = [each[1] for each in (one, several, *adapted)]
    assert launches == [1, 1, 1, 1, 1]
    assert several[0] > 3 * one[0]
    rates = [
        each[0] / plain[0] for each, plain in zip(adapted, (one, several, several), strict=True)
    ]
    assert all(rate > least for rate, least in zip(rates, kept, strict=True)), rates
    assert [each[1] for each in steps] == [10 * LAYERS + 4] * 2
    if name == "H100":
        assert steps[0][0] < 3 * one[0]
        assert steps[1][0] < 0.4 * one[0]
