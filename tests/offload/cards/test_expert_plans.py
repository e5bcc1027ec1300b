"""What the planner expects of a mixture on a card, against the virtual card's runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localrt.models.decoder import Decoder
from localrt.offload.placement import Where
from localrt.offload.planner import shape_from_checkpoint
from localrt.offload.planner.costs import Costs, expert_costs
from localrt.offload.planner.machine import GpuProfile, KernelRate, MachineProfile
from localrt.offload.planner.simulate import simulate
from tests.models.tiny import tokens
from tests.offload.cards.carded import CALL, FLOPS, MEMORY, on_card, place_on_card
from tests.offload.cards.test_hybrid_experts import places, stages
from tests.offload.placed import Model, extend, needs_kernels, wide_mixture

pytestmark = needs_kernels

EXPERT_S = 2e-3  # of an expert on the CPU: about what copying two takes
LINK = 2.5e7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A mixture of many experts in a store."""
    opened = wide_mixture(tmp_path_factory.mktemp("moe"), 8)
    yield opened
    opened.close()


def machine(costs_of: int) -> MachineProfile:
    """The virtual card of ``carded``, and a CPU that takes ``EXPERT_S`` for an expert."""
    rate = KernelRate((1,), (EXPERT_S / costs_of,))
    return MachineProfile(
        name="test",
        ssd_bytes_s=1e9,
        ram_bytes_s=100 * LINK,
        kernels={"f32": rate, "bf16": rate},
        attention=KernelRate((1,), (1e-12,)),
        call_s=0.0,
        token_s=0.0,
        link_bytes_s=LINK,
        link_latency_s=0.0,
        gpu=GpuProfile(
            name="virtual", vram_bytes=1 << 30, bytes_s=MEMORY, flops=FLOPS, call_s=CALL
        ),
    )


class Paced:
    """The CPU's ``Ops`` and clock, which charge ``EXPERT_S`` for an expert, noise or not."""

    def __init__(self, placed: Decoder) -> None:
        self._ops, self._clock, self._experts = placed.ops, placed.residency.clock, 0
        stage: Any = stages(placed)
        stage._host = stage._clock = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def run_experts(self, *args: Any) -> None:
        self._ops.run_experts(*args)
        self._experts += len(args[-1])

    def now(self) -> float:
        return self._clock.now()

    def begin(self, resource: Any) -> float:
        return self._clock.begin(resource)

    def end(self, resource: Any, name: str, started: float, **options: Any) -> Any:
        if resource == "cpu":
            options["cost_s"], self._experts = EXPERT_S * self._experts, 0
        return self._clock.end(resource, name, started, **options)


@pytest.mark.parametrize("share", [0.12, 0.2, 0.3])
def test_predictions_are_within_a_tenth_of_the_virtual_card(model: Model, share: float) -> None:
    shape = shape_from_checkpoint(model.store)
    largest = max((u for u in shape.units if u.kind == "expert"), key=lambda unit: unit.nbytes)
    profile = machine(largest.macs)
    costs = Costs(shape=shape, machine=profile)
    hybrid = expert_costs(costs)
    where = places(model, share)
    with on_card(model, where, card={"link_bytes_s": LINK}, expert_costs=hybrid) as placed:
        stages(placed).fills = False
        Paced(placed)
        cache = placed.cache(200)
        for token in tokens(40):
            extend(placed, cache, [token])
        before, began = placed.residency.counts(), placed.residency.clock.now()
        text = tokens(60, seed=1)
        for token in text:
            extend(placed, cache, [token])
        after, ended = placed.residency.counts(), placed.residency.clock.now()
    measured = (ended - began) / len(text)
    uses = after.expert_uses - before.expert_uses
    hits = (after.expert_hits - before.expert_hits) / uses
    placement = place_on_card(model.store, where)
    held = Costs(shape=shape, machine=profile, expert_hits=hits)
    expected = simulate(held, placement, passes=60)
    assert expected.seconds - held.per_pass() == pytest.approx(measured, rel=0.1)


def test_what_is_in_no_memory_is_read_and_never_copied(model: Model) -> None:
    shape = shape_from_checkpoint(model.store)
    largest = max((u for u in shape.units if u.kind == "expert"), key=lambda unit: unit.nbytes)
    costs = Costs(shape=shape, machine=machine(largest.macs))
    half = simulate(costs, place_on_card(model.store, places(model, 0.2, ssd=0.5)), passes=40)
    read = 0.8 * 0.5 * sum(u.nbytes * u.use for u in shape.units if u.kind == "expert")
    assert half.nbytes["ssd"] == pytest.approx(read, rel=0.1)
    none = simulate(costs, place_on_card(model.store, places(model, 0.2, ssd=1.0)), passes=40)
    assert none.nbytes["ssd"] == pytest.approx(2 * read, rel=0.1)
    assert none.nbytes["link"] == 0
    assert Where.VRAM in places(model, 0.2).values()
