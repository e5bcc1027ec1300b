"""A target and its draft: the placement keeps the budgets, and one rule chooses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.drafts.placement import PairPlan, plan_pair
from localrt.offload.account import Budgets
from localrt.offload.shapes import ModelShape
from localrt.planning.forecast import PlanRequest
from localrt.planning.machine import MachineProfile
from tests.planner.models import MB, machine, shape

TARGET = shape(layers=6)
DRAFT = replace(shape(layers=2, attention=4096 * 60, mlp=4096 * 200, head=1), name="test draft")
CTX = 256


def find(
    *,
    vram: int = 40 * MB,
    ram: int = 200 * MB,
    on: MachineProfile | None = None,
    draft: ModelShape = DRAFT,
    acceptance: float | None = 0.9,
) -> PairPlan | None:
    budgets = Budgets(ram=ram, vram=vram, process=10 * MB, cuda_context=0)
    target = PlanRequest(
        shape=TARGET, machine=on or machine(gpu=True), budgets=budgets, ctx=CTX, prefill_rows=32
    )
    return plan_pair(target, draft, draft_ctx=CTX, acceptance=acceptance)


def planned(**options: Any) -> PairPlan:
    plan = find(**options)
    assert plan is not None
    return plan


@settings(max_examples=15)
@given(vram=st.integers(0, 120), ram=st.integers(30, 200), acceptance=st.floats(0, 1))
def test_budgets(vram: int, ram: int, acceptance: float) -> None:
    plan = find(vram=vram * MB, ram=ram * MB, acceptance=acceptance)
    if plan is None:
        return
    memory = plan.plan.memory
    assert memory.total("vram") + plan.vram <= vram * MB
    assert memory.total("ram") + plan.ram <= ram * MB
    assert (plan.vram > 0) == (plan.place == "draft on GPU")
    assert (plan.ram > 0) == (plan.place == "draft on CPU")


def test_better_draft() -> None:
    rates = [planned(acceptance=share).tok_s for share in (0.0, 0.5, 0.7, 0.9, 1.0)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert planned(acceptance=1.0).tokens_per_pass == pytest.approx(5)


def test_both_fit_on_the_gpu() -> None:
    plan = planned(vram=200 * MB)
    assert plan.place == "draft on GPU"
    assert plan.plan.fits
    assert plan.plain_tok_s < plan.tok_s
    assert plan.tok_s == pytest.approx(plan.tokens_per_pass / (plan.verify_s + plan.draft_s))
    assert plan.why == "both models fit on the GPU"
    assert "tokens per pass" in plan.report()


@pytest.mark.parametrize("vram", [4, 20, 40])
def test_in_ram_where_both_do_not_fit_on_the_gpu(vram: int) -> None:
    plan = planned(vram=vram * MB)
    assert plan.place == "draft on CPU"
    assert plan.plan.tok_s >= 0.9 * plan.plain_tok_s
    assert "takes no speed from the model" in plan.why


def test_in_ram_beside_a_target_on_the_disk() -> None:
    plan = planned(vram=0, ram=60 * MB)
    assert plan.plan.read_bytes
    assert plan.place == "draft on CPU"
    assert "while they wait" in plan.why


def test_draft_that_fits_nowhere() -> None:
    plan = planned(draft=shape(layers=200))
    assert plan.place == "no draft"
    assert "of RAM may be used" in plan.why
    assert plan.tok_s == plan.plain_tok_s
    assert plan.report().count("\n") == 0


def test_nothing_fits() -> None:
    assert find(ram=5 * MB) is None
