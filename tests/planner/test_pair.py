"""A target and its draft on one card: every way keeps the budgets, and the choice is the best."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.common.errors import OptionError
from localrt.offload.account import Budgets
from localrt.offload.planner.machine import MachineProfile
from localrt.offload.planner.pair import AcceptanceSource, PairPlan, PairRequest, plan_pair
from localrt.offload.planner.plan import PlanRequest
from localrt.offload.shapes import ModelShape
from tests.planner.models import MB, machine, shape

TARGET = shape(layers=6)
DRAFT = replace(shape(layers=2, attention=4096 * 60, mlp=4096 * 200, head=1), name="test draft")
CTX = 256


def request(
    *,
    vram: int = 40 * MB,
    ram: int = 200 * MB,
    on: MachineProfile | None = None,
    draft: ModelShape = DRAFT,
    **more: Any,
) -> PairRequest:
    target = PlanRequest(
        shape=TARGET,
        machine=on or machine(gpu=True),
        budgets=Budgets(ram=ram, vram=vram, process=10 * MB, cuda_context=0),
        ctx=CTX,
        prefill_rows=32,
    )
    return PairRequest(target=target, draft=draft, draft_ctx=CTX, **more)


def planned(**options: Any) -> PairPlan:
    plan = plan_pair(request(**options))
    assert plan is not None
    return plan


@settings(max_examples=15)
@given(
    vram=st.integers(0, 120),
    ram=st.integers(30, 200),
    acceptance=st.floats(0, 1),
    source=st.sampled_from(list(AcceptanceSource)),
)
def test_no_way_exceeds_a_budget(
    vram: int, ram: int, acceptance: float, source: AcceptanceSource
) -> None:
    asked = request(vram=vram * MB, ram=ram * MB, acceptance=acceptance, source=source)
    plan = plan_pair(asked)
    if plan is None:
        return
    budgets = asked.target.budgets
    for each in plan.candidates:
        if each.plan is None:
            assert each.problem
            continue
        memory = each.plan.memory
        assert memory.total("vram") + each.draft_vram <= budgets.vram
        assert memory.total("ram") + each.draft_ram <= budgets.ram
        assert (each.draft_vram > 0) == (each.way in ("draft on card", "both on card"))
        assert (each.draft_ram > 0) == (each.way == "draft on CPU")
        if each.way == "draft on card":
            assert not each.plan.placement.uses_gpu
    assert plan.best.tok_s > 0
    drafted = [each.tok_s for each in plan.candidates if each.way != "no draft"]
    if plan.best.way != "no draft":
        assert plan.best.tok_s >= 0.98 * max(drafted)
    elif source is not AcceptanceSource.ASSUMED:
        assert plan.best.tok_s >= max(drafted)


@settings(max_examples=15)
@given(
    speed=st.floats(1, 20),
    link=st.floats(1, 8),
    vram=st.sampled_from([12, 25, 40, 80]),
    ram=st.sampled_from([50, 80, 200]),
)
def test_a_faster_card_never_makes_the_pair_slower(
    speed: float, link: float, vram: int, ram: int
) -> None:
    slow = machine(gpu=True, link=2e9)
    assert slow.gpu is not None
    card = replace(slow.gpu, bytes_s=20e9, flops=1e12)
    slow = replace(slow, gpu=card)
    fast = replace(
        slow,
        gpu=replace(card, bytes_s=speed * card.bytes_s, flops=speed * card.flops),
        link_bytes_s=link * 2e9,
    )
    sizes = {"vram": vram * MB, "ram": ram * MB, "source": AcceptanceSource.GIVEN}
    before, after = planned(on=slow, **sizes), planned(on=fast, **sizes)
    # The target is searched for by rules, which may miss a few per cent.
    assert after.best.tok_s >= 0.95 * before.best.tok_s
    ours, theirs = before.way("draft on card"), after.way("draft on card")
    assert ours is not None
    assert theirs is not None
    assert theirs.tok_s >= ours.tok_s * (1 - 1e-9)


def test_a_better_draft_never_makes_the_pair_slower() -> None:
    rates = [
        planned(acceptance=share, source=AcceptanceSource.MEASURED).best.tok_s
        for share in (0.5, 0.7, 0.8, 0.9, 0.99)
    ]
    assert rates == sorted(rates)


def test_the_draft_goes_to_the_card_and_the_cpu_verifies() -> None:
    plan = planned(vram=20 * MB, ram=50 * MB, acceptance=0.9)
    assert plan.best.way == "draft on card"
    assert plan.best.guesses > 0
    assert plan.best.tokens_per_pass > 1
    assert plan.line().startswith("the draft on the card, the target verified by the CPU: ")
    assert "no draft" in plan.line()


def test_a_large_card_takes_both_and_one_without_room_the_target() -> None:
    assert planned(vram=200 * MB, acceptance=0.9).best.way == "both on card"
    small = planned(vram=4 * MB, acceptance=0.9)
    way = small.way("draft on card")
    assert way is not None
    assert way.plan is None
    assert "it needs" in way.problem
    assert "the card has 4 MB" in way.problem
    assert small.best.way in ("draft on CPU", "no draft")


def test_a_draft_that_fits_nowhere_is_left_out() -> None:
    giant = shape(layers=200)
    plan = planned(draft=giant)
    assert plan.best.way == "no draft"
    assert all(each.problem for each in plan.candidates[:-1])
    assert plan.best.plan is not None


def test_without_a_card_there_are_two_ways() -> None:
    plan = planned(on=machine(), vram=0, acceptance=0.9)
    assert [each.way for each in plan.candidates] == ["draft on CPU", "no draft"]
    assert "draft and target on the CPU" in "\n".join(plan.table())


def test_only_what_is_known_leaves_a_draft_out() -> None:
    """An assumption gets the benefit of the doubt."""
    hopeless = {"vram": 60 * MB, "acceptance": 0.02}
    assert planned(**hopeless, source=AcceptanceSource.MEASURED).best.way == "no draft"
    assert planned(**hopeless, source=AcceptanceSource.ASSUMED).best.way != "no draft"


def test_nothing_fits() -> None:
    assert plan_pair(request(ram=5 * MB)) is None


def test_as_a_table_and_as_json() -> None:
    plan = planned(acceptance=0.8, source=AcceptanceSource.GIVEN)
    lines = plan.table()
    assert lines[0] == (
        "With test draft as its draft, of whose first choices 80 % come true (given)"
    )
    assert sum("(best)" in line for line in lines) == 1
    assert len(lines) == 2 + len(plan.candidates)
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["best"] == plan.best.way
    assert values["acceptance_source"] == "given"
    assert {each["way"] for each in values["candidates"]} == {
        "draft on card",
        "both on card",
        "draft on CPU",
        "no draft",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [({"acceptance": share}, "acceptance") for share in (1.5, -1.0, float("nan"))],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        request(**options)


def test_a_context_of_nothing() -> None:
    with pytest.raises(OptionError, match="draft_ctx must be at least 1"):
        replace(request(), draft_ctx=0)
