"""What tokens take in virtual time: a dense model that is streamed, MLPs that GPU and CPU share, a
mixture on the routing of a trained one, and a switch between two models.

Kernels compute nothing; placements, queues and the expert cache are the product's own. The model of
14B has a thousandth of its bytes. The clock is that of an H100 held to 8 GB (docs/gpu.md): of the
pipeline that ran there, whose threads waited for every copy, it said 43.5 and 38.0 ms a token at 49
and 12 GB/s, where 41.8 and 37.9 were measured, before it counted the kernels within graphs: 1 ms.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.random_store import write_store
from localrt.common.files import PAGE
from localrt.models.decoder import Decoder
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.experts.hybrid import HybridExperts, RecordedLayers, RecordedPass
from localrt.offload.placement import Placement, Where
from localrt.offload.shapes import shape_from_checkpoint
from localrt.planning.costs import Costs
from localrt.planning.machine import GpuProfile, KernelRate, MachineProfile
from localrt.planning.search import best_solution
from localrt.planning.simulate import simulate
from localrt.planning.solve import Rooms
from tests.driver.inside.conftest import Kernels
from tests.driver.inside.gpus import all_in_ram, made, on_gpu, stages
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
from tests.offload.routing import TrainedChoices

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
@pytest.mark.parametrize(
    ("machine", "tok_s", "gain"),
    [(card(49e9), 45, 1.1), (card(12e9), 33, 1.15), (RTX_4060, 22, 1.3)],
    ids=["49 GB/s", "12 GB/s", "4060"],
)
def test_split(
    tall: Model, driver: Driver, gpu: Kernels, machine: Machine, tok_s: float, gain: float
) -> None:
    """GPU and CPU compute each MLP at once: faster than in turns, and as forecast."""
    mlp = next(unit.nbytes for unit in tall.store.manifest.units if ".mlp" in unit.name)
    machine = replace(machine, scale=148e6 / mlp)
    costs = profile(tall, machine)
    best = [planned(tall, costs, splits=splits) for splits in (False, True)]
    took = [decode(tall, driver, machine, each).seconds for each in best]
    costs = replace(costs, held=40)
    replayed = [simulate(costs, each, passes=3, warm_up=2).seconds for each in best]
    assert replayed == pytest.approx(took, rel=0.1)
    assert 1 / took[1] > tok_s
    assert took[0] / took[1] > gain


# -- a mixture -------------------------------------------------------------------------------------


COUNT, USED = 64, 8
CONFIG = {
    "vocab_size": 14_000,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_experts": COUNT,
    "num_experts_per_tok": USED,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""Layers, their attention, experts and the head in the proportions of Qwen3.5-35B-A3B, with a
quarter of its experts."""
EXPERT = 3 * 128 * 32 * 9 / 16  # bytes
GEFORCE = Machine(
    link=12.5e9, gpu=245e9, cpu=50e9, kernel=2.75e-6, scale=1.45e6 / EXPERT, expert=1.45e6
)
"""An RTX 4060 beside DDR5-5600; the experts are of 3.4 bits."""
MEASURED, WARM = 150, 250


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("mixture") / "store"
    write_store(path, "Qwen3MoeForCausalLM", CONFIG, "int4-g32")
    with closing(Model(path)) as model:
        yield model


class Choices(TrainedChoices):
    """The trace's, of every layer."""

    token = 0

    def most_used(self) -> list[tuple[int, int]]:
        """Experts, (expert, layer), by how often the tokens before the measured ones use them."""
        used = np.zeros((COUNT, LAYERS), int)
        for layer, token in np.ndindex(LAYERS, WARM):
            used[self.choose(layer, token, USED)[0], layer] += 1
        order = np.argsort(-used, axis=None, kind="stable")
        return [(int(key) // LAYERS, int(key) % LAYERS) for key in order]

    def put(self, layer: RecordedPass) -> None:
        """Write a layer's choice where the GPU would have."""
        routing = layer.share.routing
        chosen = self.choose(layer.routed.place, self.token, 2 * USED)
        routing.experts[0], routing.scores[0] = chosen


@dataclass(frozen=True)
class Rates:
    """Of the last tokens: how many a second, the share of hits, launches, bytes over the link, and
    the share of time in which the GPU was at work.
    """

    tok_s: float
    hits: float
    launches: float
    link: float
    gpu: float


@contextmanager
def opened_mixture(
    model: Model, machine: Machine, share: float
) -> Iterator[tuple[VirtualTime, Decoder]]:
    names = [unit.name for unit in model.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    where = dict.fromkeys(names, Where.VRAM) | {"norm": Where.RAM, "embedding": Where.RAM}
    where |= dict.fromkeys(experts[round(share * len(experts)) :], Where.RAM)
    plan = Placement(where=where, kv=("vram",) * LAYERS, prefill_rows=1000)
    fetch = machine.expert / machine.link
    on_cpu, there = machine.expert / machine.cpu, machine.expert / machine.gpu
    costs = ExpertCosts(cpu=on_cpu, gpu=there, fetch=fetch)
    with (
        virtual_time(machine, lambda name: 0) as time,
        on_gpu(model, where, placement=plan, make=made("cuda"), expert_costs=costs) as decoder,
    ):
        while not all_in_ram(decoder):
            time.wait_until(time.now + 1e-3, sleeps=False)  # reading threads go on
            for pool in stages(decoder).memory.pools:
                pool._settle_arrived()
        yield time, decoder


def decode_mixture(
    model: Model,
    driver: Driver,
    gpu: Kernels,
    machine: Machine,
    share: float,
    *,
    fills: bool = True,
    copies: bool = False,
) -> Rates:
    """With a ``share`` of the experts on the GPU: without ``fills`` always the same ones, those
    that the tokens before use most; with ``copies`` the CPU computes none: absent ones are copied.
    """
    choices = Choices(COUNT)
    driver.idle(False)  # until all is recorded
    with (
        opened_mixture(model, machine, share) as (time, decoder),
        pytest.MonkeyPatch.context() as patch,
    ):
        hybrid, learn = stages(decoder), HybridExperts.learn

        def serve(layers: RecordedLayers, check: Any) -> None:
            for layer in layers._layers:
                choices.put(layer)
                absent = len(layer.absent())
                time.share(USED - absent, absent, copies=copies)
            hybrid.served(layers._layers, 0.0)

        def timed_learn(hybrid: HybridExperts) -> None:
            if hybrid._served:
                time.spend(machine.learning)
            learn(hybrid)

        patch.setattr(RecordedLayers, "__call__", serve)
        patch.setattr(HybridExperts, "learn", timed_learn)
        patch.setattr(hybrid._recorder, "while_waiting", hybrid.learn)
        fill(hybrid, choices.most_used() if not fills else np.ndindex(COUNT, LAYERS))
        hybrid.fills = fills
        cache = decoder.cache(2000)
        extend(decoder, cache, [1])
        hybrid._recorder.most_new = 1000
        driver.idle(True)
        for token in range(WARM + MEASURED):
            if token == WARM:
                begin, hits, uses = time.now, hybrid.hits, hybrid.uses
                gpu.launches.clear()
                copied = hybrid.gpu.link_bytes
            choices.token = token
            extend(decoder, cache, [1])
            time.spend(BETWEEN)
        seconds = (time.now - begin) / MEASURED
        return Rates(
            1 / seconds,
            (hybrid.hits - hits) / (hybrid.uses - uses),
            len(gpu.launches) / MEASURED,
            (hybrid.gpu.link_bytes - copied) / MEASURED * machine.scale,
            time.busy("gpu", begin, time.now),
        )


def fill(hybrid: HybridExperts, keys: Iterable[tuple[int, ...]]) -> None:
    """The first experts of ``keys``, (expert, layer), in all slots."""
    for expert, layer in itertools.islice(keys, hybrid.slots.cache.capacity):
        hybrid.copies.bring(layer, expert)
    hybrid.settle()


def test_mixture(mixture: Model, driver: Driver, gpu: Kernels) -> None:
    """With 37 % of the experts on the GPU."""
    rates = decode_mixture(mixture, driver, gpu, GEFORCE, 0.37)
    assert rates.tok_s > 73
    assert rates.launches < 3.5  # entries, layers, head


@pytest.mark.slow
def test_division(mixture: Model, driver: Driver, gpu: Kernels) -> None:
    """CPU and GPU with a cache that learns, against one that does not, and against copies alone."""
    dynamic, static, copies = (
        decode_mixture(mixture, driver, gpu, GEFORCE, 0.37, **options)
        for options in ({}, {"fills": False}, {"copies": True})
    )
    assert dynamic.hits > static.hits
    assert dynamic.tok_s > 0.99 * static.tok_s
    assert dynamic.tok_s > 1.3 * copies.tok_s


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
