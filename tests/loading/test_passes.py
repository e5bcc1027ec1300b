"""What loading makes of measured passes: corrections, a forecast, and a note on better places."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from localrt.common.formatting import format_rate
from localrt.common.settings import Settings
from localrt.loading import passes
from localrt.loading.context import LoadContext
from localrt.loading.passes import Passes, corrections_of, measured
from localrt.models.weight_store import Task
from localrt.offload.account import Budgets
from localrt.planning.advice import make_forecast
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.planning.gpus import GPUS, measured_profile
from localrt.planning.machine import Corrections
from localrt.planning.measure import with_corrections
from localrt.planning.simulate import simulate
from tests.planner.models import RATE, machine, shape

MB = 1_000_000


def plan(*, experts: int = 0, vram: int = 100) -> Forecast:
    """Of a model for a measured GPU that has not room for all of it, with whole layers."""
    profile = measured_profile("RTX 4060 8GB", 8 << 30, RATE)
    here = replace(machine(), gpu=profile, link_bytes_s=RATE.to_gpu_bytes_s)
    model = shape(layers=24, mlp=4096 * 2000, experts=experts)
    budgets = Budgets(ram=2_000 * MB, vram=vram * MB, process=20 * MB, cuda_context=0)
    request = PlanRequest(shape=model, machine=here, budgets=budgets, ctx=256, splits=False)
    return make_forecast(request)


def as_if(plan: Forecast, corrections: Corrections) -> Passes:
    """Passes that took what a replay with these corrections says, all of a kind in one task."""
    mixture = plan.request.shape.experts is not None
    here = replace(plan.request.machine, corrections=(corrections, corrections))
    costs = replace(plan.request, machine=here).costs(held=5)
    whole = simulate(costs, plan.placement)
    units = simulate(replace(costs, machine=replace(here, shared_s=0.0)), plan.placement)
    by_cpu = units.busy["cpu"] - costs.per_pass()
    ways, now, found = 2 * costs.crossing(), 0.0, list[list[Task]]()
    for _ in range(4):
        started, now = now + 1e-3, now + 1e-3 + by_cpu
        tasks = [Task("gpu", "layers.0.attention", now - by_cpu - 1e-3, now - by_cpu)]
        if mixture:
            tasks.append(Task("cpu", "layers.0.experts", started - 1e-3, started - 1e-3 + by_cpu))
        else:
            now += costs.visit() + ways
            tasks.append(Task("cpu", "layers.0.mlp", started, started + by_cpu))
        tasks.append(Task("gpu", "head", now, now + units.busy["gpu"] - 1e-3))
        now = tasks[-1].end + costs.per_pass() + ways
        if (
            name := next((n for n, p in plan.placement.where.items() if p.copied), None)
        ) is not None:
            (nbytes,) = (unit.nbytes for unit in costs.shape.units if unit.name == name)
            copying = nbytes * units.busy["link"] / units.nbytes["link"]
            tasks.append(Task("link", name, 0.0, copying))
        found.append(tasks)
    return Passes(found, [whole.seconds] * 3, None)


@pytest.mark.parametrize(
    "real",
    [
        Corrections(),
        Corrections(link=1.7),
        Corrections(cpu=2.0),
        Corrections(gpu=2.0),
        Corrections(visit=3.0),
        Corrections(token=0.4),
        Corrections(link=1.5, cpu=0.6, gpu=1.4, visit=1.5, token=2.0),
    ],
    ids=str,
)
def test_dense_models(real: Corrections) -> None:
    found = plan()
    corrected = corrections_of(as_if(found, real), found.request.costs(held=5), found.placement)
    assert asdict(corrected) == pytest.approx(asdict(real), rel=0.15)


@pytest.mark.parametrize("gpu", [0.5, 1.0, 2.0, 3.5])
def test_mixtures(gpu: float) -> None:
    """What is left of their passes is the GPU's."""
    found, real = plan(experts=8, vram=250), Corrections(gpu=gpu)
    costs, passes = found.request.costs(held=5), as_if(found, real)
    corrected = corrections_of(passes, costs, found.placement)
    assert asdict(corrected) == pytest.approx(asdict(real), rel=0.15)
    machine = replace(costs.machine, corrections=(None, corrected))
    again = simulate(replace(costs, machine=machine), found.placement)
    assert again.seconds == pytest.approx(passes.seconds[0], rel=0.03)


def load(
    plan: Forecast, found: Corrections, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Forecast, list[str]]:
    """The plan and the notes of a load that finds these corrections."""
    notes = list[str]()
    monkeypatch.setattr(passes, "is_busy", lambda: False)
    monkeypatch.setattr(passes, "run_passes", lambda *_: Passes([], [0.02, 0.03, 0.02], None))
    monkeypatch.setattr(passes, "corrections_of", lambda *_: found)
    streamed: Any = None
    settings = replace(Settings.from_environment(), cache_dir=cache)
    context = LoadContext(settings=settings, notes=notes)
    return measured(plan, streamed, context), notes


@pytest.mark.parametrize(
    ("found", "moves"),
    [
        (Corrections(), False),
        (Corrections(link=1.1, cpu=1.1, visit=1.2), False),
        (Corrections(link=1.7), True),
        (Corrections(link=0.6, cpu=2.0), True),
    ],
    ids=str,
)
def test_next_load(
    found: Corrections, moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It places units by what was measured, and a note says so where that is worth it."""
    first = plan()
    now, notes = load(first, found, tmp_path, monkeypatch)
    assert now.placement == first.placement
    machine = with_corrections(first.request.machine, tmp_path)
    assert machine.corrections == (found, None)
    later = make_forecast(replace(first.request, machine=machine))
    assert bool(notes) is moves is (later.tok_s > 1.05 * now.tok_s)
    if moves:
        assert later.placement.where != first.placement.where
        assert notes == [
            f"{format_rate(now.tok_s)} tok/s are expected as measured; when it is loaded again, "
            f"with weights in other places, about {format_rate(later.tok_s)}"
        ]
    # Nothing is measured again.
    monkeypatch.setattr(passes, "run_passes", None)
    settings = replace(Settings.from_environment(), cache_dir=tmp_path)
    assert measured(later, None, LoadContext(settings=settings)) is later  # type: ignore[arg-type]


def test_both_kinds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Corrections(link=1.5), Corrections(visit=0.5)
    load(plan(), first, tmp_path, monkeypatch)
    mixture = plan(experts=8)
    here = with_corrections(mixture.request.machine, tmp_path)
    mixture = replace(mixture, request=replace(mixture.request, machine=here))
    now, notes = load(mixture, second, tmp_path, monkeypatch)
    assert now.request.machine.corrections == (first, second)
    assert with_corrections(plan().request.machine, tmp_path).corrections == (first, second)
    assert notes == []


@pytest.mark.parametrize("where", ["nothing measured", "GPU alone"])
def test_models_that_need_none(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(vram=8000)
    if where == "nothing measured":
        gpu = GPUS["RTX 4060 8GB"].profile
        request = replace(found.request, machine=replace(found.request.machine, gpu=gpu))
        found = replace(plan(), request=request)
    now, notes = load(found, Corrections(link=2.0), tmp_path, monkeypatch)
    assert (now, notes) == (found, [])
