"""A target and its draft: every placement keeps the budgets, and the best forecast is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.common.errors import OptionError
from localrt.drafts.placement import PairCandidate, PairPlan, plan_pair
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
        shape=TARGET,
        machine=on or machine(gpu=True),
        budgets=budgets,
        ctx=CTX,
        prefill_rows=32,
    )
    return plan_pair(target, draft, draft_ctx=CTX, acceptance=acceptance)


def planned(**options: Any) -> PairPlan:
    plan = find(**options)
    assert plan is not None
    return plan


def at(plan: PairPlan, place: str) -> PairCandidate:
    return next(each for each in plan.candidates if each.place == place)


@settings(max_examples=15)
@given(vram=st.integers(0, 120), ram=st.integers(30, 200), acceptance=st.floats(0, 1))
def test_budgets(vram: int, ram: int, acceptance: float) -> None:
    plan = find(vram=vram * MB, ram=ram * MB, acceptance=acceptance)
    if plan is None:
        return
    for each in plan.candidates:
        if each.plan is None:
            assert each.problem
            continue
        memory = each.plan.memory
        assert memory.total("vram") + each.vram <= vram * MB
        assert memory.total("ram") + each.ram <= ram * MB
        assert (each.vram > 0) == (each.place == "draft on GPU")
        assert (each.ram > 0) == (each.place == "draft on CPU")
        assert each.tok_s >= each.plain_tok_s
    assert plan.best.tok_s >= 0.98 * max(each.tok_s for each in plan.candidates)


@settings(max_examples=15)
@given(
    speed=st.floats(1, 20),
    link=st.floats(1, 8),
    vram=st.sampled_from([12, 25, 40, 80]),
    ram=st.sampled_from([50, 80, 200]),
)
def test_faster_gpu(speed: float, link: float, vram: int, ram: int) -> None:
    slow = machine(gpu=True, link=2e9)
    assert slow.gpu is not None
    gpu = replace(slow.gpu, bytes_s=20e9, flops=1e12)
    slow = replace(slow, gpu=gpu)
    fast = replace(
        slow,
        gpu=replace(gpu, bytes_s=speed * gpu.bytes_s, flops=speed * gpu.flops),
        link_bytes_s=link * 2e9,
    )
    sizes = {"vram": vram * MB, "ram": ram * MB, "acceptance": 0.7}
    before, after = planned(on=slow, **sizes), planned(on=fast, **sizes)
    # The target is searched for by rules, which may miss a few per cent.
    assert after.best.tok_s >= 0.95 * before.best.tok_s


def test_better_draft() -> None:
    rates = [planned(acceptance=share).best.tok_s for share in (0.0, 0.5, 0.7, 0.9, 1.0)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    certain = at(planned(acceptance=1.0), "draft on CPU")
    assert certain.tokens_per_pass == pytest.approx(1 + certain.draft_tokens)


def test_draft_on_the_gpu_and_target_on_the_cpu() -> None:
    plan = planned(vram=20 * MB, ram=50 * MB)
    best = plan.best
    assert best.place == "draft on GPU"
    assert 1 <= best.levels <= best.draft_tokens
    assert 1 < best.tokens_per_pass <= 1 + best.levels
    assert best.plain_tok_s < best.tok_s
    assert best.tok_s == pytest.approx(best.tokens_per_pass / (best.verify_s + best.draft_s))
    assert plan.why().startswith("the draft on the GPU, the target on the CPU: ")
    assert "no draft" in plan.why()


def test_size_of_the_gpu() -> None:
    large = planned(vram=200 * MB)
    assert large.best.place == "draft on GPU"
    assert large.best.plan is not None
    assert large.best.plan.placement.uses_gpu
    small = planned(vram=4 * MB)
    assert at(small, "draft on GPU").plan is None
    assert "it needs" in small.why()
    assert "the GPU has 4 MB" in small.why()


def test_draft_that_fits_nowhere_or_never_pays() -> None:
    plan = planned(draft=shape(layers=200))
    assert plan.best.place == "no draft"
    assert all(each.problem for each in plan.candidates[:-1])
    assert planned(vram=30 * MB, ram=60 * MB, acceptance=0.02).best.place == "no draft"


def test_nothing_fits() -> None:
    assert find(ram=5 * MB) is None


@pytest.mark.parametrize("share", [1.5, -1.0, float("nan")])
def test_bad_acceptance(share: float) -> None:
    with pytest.raises(OptionError, match="acceptance must be from 0 to 1"):
        find(acceptance=share)
