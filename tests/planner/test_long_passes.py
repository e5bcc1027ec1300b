"""Prompts beside a GPU: what crosses the link for them, from how many rows on, in which chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import MemoryBudgetError
from localrt.offload.account import Budgets
from localrt.offload.placement import LEAST_GPU_ROWS, Placement, Where
from localrt.planning.costs import Costs, with_long_passes
from localrt.planning.forecast import Forecast, placed_shape
from localrt.planning.machine import KernelRate, MachineProfile
from localrt.planning.plan import explain
from localrt.planning.simulate import simulate
from tests.planner.models import MB, machine, planned, published, shape


def with_cpu(link: float, cpu: float) -> MachineProfile:
    """A machine whose processor takes ``cpu`` seconds per weight and row."""
    rate = KernelRate((1, 512), (cpu, 512 * cpu))
    return replace(machine(gpu=True, link=link), kernels={"int4-g32": rate})


def half_in_ram(experts: int) -> tuple[Placement, Costs]:
    """Everything but half of the MLPs, or of the experts, on the GPU."""
    model = shape(layers=4, experts=experts)
    kind = "expert" if experts else "mlp"
    moved = [unit.name for unit in model.units if unit.kind == kind][::2]
    where = {unit.name: Where.RAM if unit.name in moved else Where.VRAM for unit in model.units}
    where["embedding"] = Where.RAM
    placement = Placement(where=where, kv=("vram",) * 4, vram_ring=4096 * 2000, prefill_rows=2048)
    return placement, Costs(shape=model, machine=machine(gpu=True))


@given(
    links=st.lists(st.floats(1e8, 1e13), min_size=2, max_size=5),
    cpu=st.floats(1e-14, 1e-8),
    experts=st.sampled_from((0, 8)),
)
def test_threshold(links: list[float], cpu: float, experts: int) -> None:
    placement, costs = half_in_ram(experts)
    found = []
    for link in sorted(links):
        own = Costs(shape=costs.shape, machine=with_cpu(link, cpu))
        found.append(with_long_passes(own, placement).gpu_rows or 1 << 30)
    assert found == sorted(found, reverse=True)
    assert min(found) >= LEAST_GPU_ROWS


def test_slow_link() -> None:
    placement, costs = half_in_ram(0)
    slow = Costs(shape=costs.shape, machine=with_cpu(1e6, 1e-12))
    assert with_long_passes(slow, placement) == placement
    quick = Costs(shape=costs.shape, machine=with_cpu(1e12, 1e-10))
    assert with_long_passes(quick, placement).gpu_rows == LEAST_GPU_ROWS


def llama(link: float = 12e9, vram: int = 12_000) -> Forecast:
    """A 70B in ``vram`` MB of GPU memory and 64 GB of RAM, with whole MLPs."""
    budgets = Budgets(ram=64_000 * MB, vram=vram * MB)
    here = machine(gpu=True, link=link)
    return planned(published("llama-3-70b"), here, budgets, ctx=2048, splits=False)


def test_mlps_cross() -> None:
    plan = llama()
    placement = plan.placement
    units = {unit.name: unit for unit in plan.request.shape.units}
    assert set(placement.kv) == {"vram"}
    assert all(placement.where[n].on_gpu for n, u in units.items() if u.kind == "attention")
    left = [n for n, u in units.items() if u.kind == "mlp" and not placement.where[n].on_gpu]
    assert left
    assert placement.crossing == frozenset(left)
    for rows, on_gpu in ((1, False), (64, False), (placement.gpu_rows, True), (2048, True)):
        assert all(placement.on(rows)[name].on_gpu is on_gpu for name in left)
    assert f"from {placement.gpu_rows} tokens a pass on, the CPU's MLPs (" in explain(plan)
    without = replace(placement, gpu_rows=0, crossing=frozenset())
    costs = plan.request.costs(rows=placement.prefill_rows)
    crossing, by_cpu = (simulate(costs, each).seconds for each in (placement, without))
    assert crossing < 0.2 * by_cpu
    assert plan.prefill_tok_s == pytest.approx(placement.prefill_rows / crossing, rel=0.1)


@pytest.mark.parametrize("link", [3e9, 6e9, 12e9])
def test_experts_cross_where_copies_are_faster(link: float) -> None:
    """The replay agrees on the fewest rows, within the steps that are tried."""
    budgets = Budgets(ram=30_000 * MB, vram=7_000 * MB)
    plan = planned(published("qwen3-30b-a3b"), machine(gpu=True, link=link), budgets, ctx=2048)
    placement = plan.placement

    def seconds(rows: int, gpu_rows: int) -> float:
        return simulate(
            plan.request.costs(rows=rows), replace(placement, gpu_rows=gpu_rows)
        ).seconds

    rows = placement.gpu_rows
    assert LEAST_GPU_ROWS < rows <= placement.prefill_rows
    assert seconds(rows, rows) < 1.02 * seconds(rows, 0)
    fewer = 3 * rows // 4
    assert seconds(fewer, 0) < 1.02 * seconds(fewer, LEAST_GPU_ROWS)
    assert seconds(64, rows) == seconds(64, 0)


def test_little_room_for_attention() -> None:
    placement = llama(vram=6_000).placement
    assert 40 < placement.kv.count("vram") < 80
    mlps = {place for name, place in placement.where.items() if name.endswith("mlp")}
    assert mlps == {Where.LINK, Where.RAM}, "none takes the room of attention"


def test_prefill_rows() -> None:
    slow, quick = llama(link=3e9), llama(link=30e9)
    assert 512 <= quick.placement.prefill_rows <= slow.placement.prefill_rows > 512
    for plan in (slow, quick):
        assert plan.memory.total("vram") <= plan.request.budgets.vram
        assert f"{plan.placement.prefill_rows} tokens a pass" in explain(plan)


@given(
    ram=st.integers(30, 90),
    vram=st.integers(5, 60),
    link=st.sampled_from((1e8, 1e10)),
    experts=st.sampled_from((0, 6)),
)
def test_crossing_units(ram: int, vram: int, link: float, experts: int) -> None:
    model = shape(layers=3, experts=experts)
    budgets = Budgets(ram=ram * MB, vram=vram * MB, process=8 * MB, cuda_context=0, scratch=0)
    try:
        plan = planned(model, machine(gpu=True, link=link), budgets, ctx=128)
    except MemoryBudgetError:
        return
    placement = plan.placement
    sizes = {unit.name: unit.nbytes for unit in placed_shape(plan).units}
    for name in placement.crossing:
        assert placement.where[name] in (Where.RAM, Where.SSD)
        assert sizes[name] <= placement.vram_ring
    assert placement.gpu_rows == 0 or placement.gpu_rows <= placement.prefill_rows
    assert plan.memory.total("vram") <= budgets.vram
