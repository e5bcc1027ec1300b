"""When a token's copies, kernels and products run, in virtual time: a model of 14B parameters at a
thousandth of its bytes, as the planner places it within 8 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from localrt.offload.pipeline import opening
from localrt.offload.placement import Where
from localrt.offload.ring import PAGE
from tests.driver.inside.conftest import Kernels
from tests.driver.inside.gpus import made
from tests.driver.standin import Driver
from tests.driver.virtual_time import Machine, VirtualTime, virtual_time
from tests.offload.gpu.placed_on_gpu import on_gpu
from tests.offload.placed import Model, extend, needs_kernels, pack_synthetic, passing

pytestmark = [needs_kernels, pytest.mark.usefixtures("emulated")]
once = pytest.mark.parametrize("driver", [0], ids=["late"], indirect=True)

LAYERS = 40
FAST = "..LC...L..C.L...CL....LC...L..C.L...CL.."
"""Where each layer's MLP is: over the link at 49 GB/s, on the CPU, or in the GPU's memory."""
SLOW = "..C..C..C..L..C..C..C..C..C..L..C..C..C."
"""At 12 GB/s."""
BETWEEN = 1.3e-3  # from a token's logits to the next pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = pack_synthetic(
        tmp_path_factory.mktemp("14b"),
        vocab=1024,
        hidden=128,
        inner=672,
        layers=LAYERS,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


@dataclass(frozen=True)
class Token:
    """What a token took, in virtual seconds, and each thread's waits for the driver."""

    seconds: float
    time: VirtualTime
    since: float
    waits: dict[str, int]

    def busy(self, resource: str) -> float:
        return self.time.busy(resource, self.since, self.since + self.seconds)


def place(sequence: str) -> dict[str, Where]:
    kinds = {".": Where.VRAM, "L": Where.LINK, "C": Where.RAM, "S": Where.SSD, "T": Where.SSD_LINK}
    return {f"layers.{n}.mlp": kinds[kind] for n, kind in enumerate(sequence)}


def decode(
    model: Model, driver: Driver, machine: Machine, sequence: str, *, ring: float = 1.25
) -> Token:
    """The last of five tokens, when everything is recorded."""
    units = {unit.name: unit.nbytes for unit in model.store.manifest.units}
    names = passing(model.store)
    where = dict.fromkeys(names, Where.VRAM) | place(sequence)

    def weights(step: str) -> int:
        if step == "head":
            return sum(size for name, size in units.items() if name.startswith("head"))
        first, _, last = step.partition(" to ")
        if first not in names:
            return 0
        run = names[names.index(first) : names.index(last or first) + 1]
        return sum(units[name] for name in run)

    largest = max(units[name] for name in names)
    slack = round((ring - 1) * largest / PAGE)
    driver.idle(True)
    try:
        with (
            virtual_time(machine, weights) as time,
            on_gpu(model, where, slack=(4 * slack, slack), make=made("cuda")) as decoder,
        ):
            cache, begins, waits = decoder.cache(40), list[float](), list[dict[str, int]]()
            for token in range(5):
                extend(decoder, cache, [token])
                time.spend(BETWEEN)
                begins.append(time.now)
                waits.append(dict(time.waits))
    finally:
        driver.idle(False)
    took, before = begins[-1] - begins[-2], waits[-2]
    return Token(took, time, begins[-2], {k: n - before.get(k, 0) for k, n in waits[-1].items()})


def h100(link: float) -> Machine:
    """What was measured on one, beside 16 cores."""
    return Machine(link=link, gpu=1.55e12, cpu=76e9, scale=1020)


@once
@pytest.mark.parametrize(
    ("link", "sequence", "seconds", "link_busy", "waits"),
    [
        pytest.param(49e9, FAST, 1 / 23.9, 0.55, 145, id="49 GB/s"),
        pytest.param(12e9, SLOW, 1 / 26.4, 0.65, 36, id="12 GB/s"),
    ],
)
def test_measured(
    model: Model,
    driver: Driver,
    gpu: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    link: float,
    sequence: str,
    seconds: float,
    link_busy: float,
    waits: int,
) -> None:
    """What an H100 held to 8 GB has measured (benchmarks/results/gpu_check.json)."""
    monkeypatch.setattr(opening, "_COPY_BLOCK", 2 * PAGE)
    token = decode(model, driver, h100(link), sequence)
    assert token.seconds == pytest.approx(seconds, rel=0.1)
    assert token.busy("link") == pytest.approx(link_busy, rel=0.1)
    copiers = sum(count for name, count in token.waits.items() if name != "pass")
    assert copiers == pytest.approx(waits, rel=0.1)
