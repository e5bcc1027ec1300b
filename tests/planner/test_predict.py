"""Rates in milliseconds, beside those of whole plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localrt.offload.account import Budgets
from localrt.planning.forecast import PlanRequest
from localrt.planning.machine import GPUS, MachineProfile, typical_machine
from localrt.planning.models import shape_from_config
from localrt.planning.search import estimate, make_forecast, whole_nbytes
from tests.planner.models import CONFIGS, published

GB = 10**9


def with_gpu() -> MachineProfile:
    gpu = GPUS["RTX 4060 8GB"]
    return replace(typical_machine(), gpu=gpu.profile, link_bytes_s=gpu.link_bytes_s)


@pytest.mark.parametrize(
    ("name", "ram", "gpu", "nearly"),
    [
        ("qwen2.5-coder-1.5b", 4 * GB, False, 0.001),
        ("qwen2.5-coder-1.5b", 700_000_000, False, 0.1),
        ("phi-4-mini", 4 * GB, True, 0.1),
        ("llama-3-70b", 32 * GB, True, 0.2),
        ("gpt-oss-20b", 8 * GB, False, 0.25),
        ("gpt-oss-20b", 32 * GB, True, 0.2),
    ],
)
def test_estimate_is_near_the_plan(name: str, ram: int, gpu: bool, nearly: float) -> None:
    machine = with_gpu() if gpu else typical_machine()
    budgets = Budgets(ram=ram, vram=8 * GB if gpu else 0)
    request = PlanRequest(shape=published(name), machine=machine, budgets=budgets, ctx=2048)
    expected, plan = estimate(request), make_forecast(request)
    assert expected is not None
    assert expected.tok_s == pytest.approx(plan.tok_s, rel=nearly)
    assert expected.needed == pytest.approx(request.shape.pass_nbytes, rel=0.001)
    assert (expected.read > 0) == (plan.read_bytes > 0)
    assert expected.place == plan.prediction.place
    # An outline lists one of a mixture's experts.
    short = shape_from_config(CONFIGS[name], name=name, experts=1)
    assert len(short.units) <= len(request.shape.units)
    assert whole_nbytes(short) == request.shape.nbytes
    assert estimate(replace(request, shape=short)) == expected


def test_nothing_fits() -> None:
    request = PlanRequest(
        shape=published("llama-3-70b"),
        machine=typical_machine(),
        budgets=Budgets(ram=GB),
        ctx=131_072,
    )
    assert estimate(request) is None
