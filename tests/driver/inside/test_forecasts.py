"""What tokens take in virtual time: a dense model that is streamed, MLPs that GPU and CPU share,
and a switch between two models.

Kernels compute nothing; placements and queues are the product's own. The model of
14B has a thousandth of its bytes. The clock is that of an H100 held to 8 GB (docs/gpu.md): of the
pipeline that ran there, whose threads waited for every copy, it said 43.5 and 38.0 ms a token at 49
and 12 GB/s, where 41.8 and 37.9 were measured, before it counted the kernels within graphs: 1 ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from localrt.common.files import PAGE
from localrt.models.decoder import Decoder
from localrt.offload.placement import Placement, Where
from localrt.offload.shapes import shape_from_checkpoint
from localrt.planning.costs import Costs
from localrt.planning.machine import GpuProfile, KernelRate, MachineProfile
from localrt.planning.search import best_solution
from localrt.planning.simulate import simulate
from localrt.planning.solve import Rooms
from tests.driver.inside.conftest import Kernels, made, on_gpu
from tests.driver.standin import Driver
from tests.driver.virtual_time import Machine, VirtualTime, virtual_time
from tests.offload.placed import (
    PLENTY,
    Model,
    extend,
    needs_kernels,
    pack_synthetic,
    passing,
    place_on_gpu,
)

pytestmark = needs_kernels

LAYERS = 40
BETWEEN = 1.3e-3  # from a token's logits to the next pass


@pytest.fixture(autouse=True)
def little_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are not scaled as the weights are: their bytes take next to no time."""
    monkeypatch.setattr(Costs, "crossing", lambda costs, width=None: costs.machine.link_latency_s)


@pytest.fixture(autouse=True)
def idle(driver: Driver) -> Iterator[None]:
    """Kernels compute nothing, once a test says so."""
    yield
    driver.idle(False)


# -- a dense model ---------------------------------------------------------------------------------

FAST = "..LC...L..C.L...CL....LC...L..C.L...CL.."
"""Where each layer's MLP is: over the link at 49 GB/s, on the CPU, or in the GPU's memory."""
SLOW = "..C..C..C..L..C..C..C..C..C..L..C..C..C."
"""At 12 GB/s."""
TOKENS = 8


def packed(folder: Path, hidden: int, inner: int) -> Model:
    sizes = {"vocab": 1024, "layers": LAYERS, "hidden": hidden, "inner": inner}
    return Model(pack_synthetic(folder, formats={"": "int4-g32"}, **sizes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with closing(packed(tmp_path_factory.mktemp("14b"), 128, 672)) as model:
        yield model


@dataclass(frozen=True)
class Token:
    """What a token takes, a mean of ``TOKENS``, in virtual seconds, each thread's waits for the
    driver, and what the pass spends on the host, without products.
    """

    seconds: float
    time: VirtualTime
    since: float
    waits: dict[str, float]
    host: float
    told: dict[str, float]  # how long resources were at work, by the pipeline's own clock

    def at_work(self, resource: str) -> float:
        """Seconds."""
        end = self.since + TOKENS * self.seconds
        return self.seconds * self.time.busy(resource, self.since, end)

    @property
    def least(self) -> float:
        """The seconds of its busiest resource; GPU, CPU and host take turns."""
        by_turns = self.at_work("gpu") + self.at_work("cpu") + self.host
        return max(self.at_work("link"), self.at_work("disk"), by_turns)


def whole(model: Model, sequence: str) -> Placement:
    """Each MLP on one processor."""
    names, kinds = passing(model.store), {".": Where.VRAM, "L": Where.LINK, "C": Where.RAM}
    largest = max(unit.nbytes for unit in model.store.manifest.units if unit.name in names)
    where = dict.fromkeys(names, Where.VRAM)
    where |= {f"layers.{n}.mlp": kinds[kind] for n, kind in enumerate(sequence)}
    slack = round(largest / 2 / PAGE)
    return place_on_gpu(model.store, where, slack=(4 * slack, slack))


@contextmanager
def opened(
    model: Model, driver: Driver, machine: Machine, placement: Placement
) -> Iterator[tuple[VirtualTime, Decoder]]:
    """A decoder in virtual time."""
    units = {unit.name: unit.nbytes for unit in model.store.manifest.units}
    driver.idle(True)
    with (
        virtual_time(machine, lambda name: units.get(name, 0)) as time,
        on_gpu(model, {}, placement=placement, make=made("cuda")) as decoder,
    ):
        yield time, decoder


def decode(model: Model, driver: Driver, machine: Machine, placement: Placement) -> Token:
    """The last of some tokens, when everything is recorded; of as many, one is timed."""
    with opened(model, driver, machine, placement) as (time, decoder):
        weights: Any = decoder.weights
        weights.tasks(keep=0)
        cache = decoder.cache(40)
        for token in range(2 * TOKENS + 1):
            if token == TOKENS + 1:
                begin, host, waits = time.now, time.host, Counter(time.waits)
                told = Counter(weights.counts().busy_s)
            extend(decoder, cache, [token])
            time.spend(BETWEEN)
        told_later = weights.counts().busy_s
    return Token(
        (time.now - begin) / TOKENS,
        time,
        begin,
        {name: (count - waits[name]) / TOKENS for name, count in time.waits.items()},
        (time.host - host) / TOKENS,
        {name: (seconds - told[name]) / TOKENS for name, seconds in told_later.items()},
    )


def card(link: float) -> Machine:
    """An H100 beside 16 cores, at another link's rate."""
    return Machine(link=link, gpu=1.55e12, cpu=76e9, scale=1020)


def profile(model: Model, machine: Machine) -> Costs:
    """The planner's costs of the same machine and model."""
    shape = shape_from_checkpoint(model.store)
    largest = max((unit for unit in shape.units if unit.kind == "mlp"), key=lambda u: u.nbytes)
    small = 1 / machine.scale
    gpu = GpuProfile(
        name="GPU", vram_bytes=1 << 40, bytes_s=machine.gpu * small, flops=1e15, call_s=7.5e-6
    )
    seconds = largest.nbytes / largest.macs / machine.cpu / small
    planned = MachineProfile(
        name="PC",
        ssd_bytes_s=machine.disk * small,
        ram_bytes_s=1e12 * small,
        kernels={unit.format: KernelRate((1,), (seconds,)) for unit in shape.units},
        attention=KernelRate((1,), (1e-15,)),
        gpu=replace(gpu, busy_link=1.0, busy_cpu=1.0),
        link_bytes_s=machine.link * small,
        shared_s=2 * machine.turn + 2 * (machine.launch + machine.call) + 6 * machine.call,
    )
    return Costs(shape=shape, machine=planned, held=40)


@pytest.mark.parametrize(("sequence", "link"), [(FAST, 49e9), (SLOW, 12e9)], ids=["49", "12"])
def test_streamed(model: Model, driver: Driver, gpu: Kernels, sequence: str, link: float) -> None:
    """As fast as what is busiest, and as forecast; the pass waits for what it needs on the host,
    and nobody for a copy.
    """
    machine, placement = card(link), whole(model, sequence)
    token = decode(model, driver, machine, placement)
    assert token.seconds <= 1.1 * token.least
    assert token.waits.keys() == {"pass"}
    assert token.waits["pass"] < sequence.count("C") + 1.5  # and for logits
    assert simulate(profile(model, machine), placement).seconds == pytest.approx(
        token.seconds, rel=0.1
    )
    if sequence == FAST:  # 40.6 tokens a second were planned for that card
        assert 1 / token.seconds > 38
        assert token.at_work("link") > 0.95 * token.seconds
        assert token.told["link"] == pytest.approx(token.at_work("link"), rel=0.05)
        assert token.told["gpu"] == pytest.approx(token.at_work("gpu"), rel=0.25)  # and launches


# -- MLPs that GPU and CPU share -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The 14B model's proportions, with rows enough for shares."""
    with closing(packed(tmp_path_factory.mktemp("tall"), 1024, 4800)) as model:
        yield model


RTX_4060 = Machine(link=12.5e9, gpu=231e9, cpu=50e9)
"""Beside DDR5-5600, with the RAM's bandwidth that copies leave the CPU."""


def planned(model: Model, costs: Costs, *, splits: bool) -> Placement:
    """The best placement with room on the GPU for 65 % of the MLPs."""
    sizes = [(u.nbytes, 0.65 if u.kind == "mlp" else u.macs > 0) for u in costs.shape.units]
    vram = sum(round(nbytes * share) for nbytes, share in sizes)
    rooms = Rooms(ram=1 << 40, vram=vram, kv=(0,) * LAYERS)
    found = best_solution(replace(costs, held=40), rooms, 512, splits=splits)
    assert found is not None
    assert bool(found.split) is splits
    return found.placement()


@pytest.mark.slow
def test_split(tall: Model, driver: Driver, gpu: Kernels) -> None:
    """GPU and CPU compute each MLP at once: faster than in turns, and as forecast."""
    mlp = next(unit.nbytes for unit in tall.store.manifest.units if ".mlp" in unit.name)
    machine = replace(RTX_4060, scale=148e6 / mlp)
    costs = profile(tall, machine)
    best = [planned(tall, costs, splits=splits) for splits in (False, True)]
    took = [decode(tall, driver, machine, each).seconds for each in best]
    costs = replace(costs, held=40)
    replayed = [simulate(costs, each, passes=3, warm_up=2).seconds for each in best]
    assert replayed == pytest.approx(took, rel=0.1)
    assert 1 / took[1] > 22
    assert took[0] / took[1] > 1.3


# -- a switch --------------------------------------------------------------------------------------


def test_switch(model: Model, driver: Driver, gpu: Kernels) -> None:
    """Of two models of 4 GB each, of which a GPU has room for one, the other answers within half a
    second: a third of it is the link's.
    """
    names = passing(model.store)
    nbytes = sum(unit.nbytes for unit in model.store.manifest.units if unit.name in names)
    machine = replace(card(12e9), scale=4e9 / nbytes)
    placement = place_on_gpu(model.store, dict.fromkeys(names, Where.VRAM))
    driver.idle(True)
    with virtual_time(machine, lambda name: 0) as time, ExitStack() as held:
        decoders = [
            held.enter_context(on_gpu(model, {}, placement=placement, make=made("cuda")))
            for _ in range(2)
        ]
        memories = [decoder.weights.memory for decoder in decoders]
        caches = [decoder.cache(64) for decoder in decoders]

        def leave(memory: Any) -> None:
            use = memory.gpu_use
            memory.set_gpu_budget(use.used - use.leavable, "")

        for decoder, cache in zip(decoders, caches, strict=True):
            for token in range(4):
                extend(decoder, cache, [token])
            assert decoder.weights.memory.gpu_use.leavable == nbytes
            leave(decoder.weights.memory)
        took = list[float]()
        for number in (0, 1, 0, 1):
            begun = time.now
            if not memories[1 - number].gpu_use.missing:
                leave(memories[1 - number])
            memories[number].set_gpu_budget(PLENTY, "")
            assert memories[number].gpu_use.missing == 0
            extend(decoders[number], caches[number], [5])
            took.append(time.now - begun)
    assert min(took) >= 4 / 12
    assert max(took) <= 0.5
