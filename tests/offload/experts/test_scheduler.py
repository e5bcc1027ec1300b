"""The scheduler: valid, never worse than one device alone, and how far from the best it can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.offload.experts.scheduler import (
    Assignment,
    ExpertCosts,
    Ready,
    schedule,
)
from tests.offload.experts.rates import Rate

seconds = st.floats(0.01, 10)
waits = st.floats(0, 10)
rates = st.builds(Rate, st.floats(0, 5), seconds, st.floats(0, 1))
all_costs = st.builds(ExpertCosts, cpu=rates, gpu=rates, fetch=seconds, link_load=st.floats(0, 0.9))
all_ready = st.builds(Ready, cpu=waits, link=waits, cpu_back=waits)
layers = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=12).map(
    lambda experts: tuple(zip(*experts, strict=True))
)
EXACT = 1e-9


@given(layer=layers, costs=all_costs, ready=all_ready)
def test_assignment(layer: tuple, costs: ExpertCosts, ready: Ready) -> None:
    rows, resident = layer
    found = schedule(rows, resident, costs, ready)
    everyone = list(range(len(rows)))
    assert sorted(found.cpu + found.gpu) == everyone
    assert all(i in found.gpu for i in everyone if resident[i]), "the GPU has begun with them"
    assert set(found.fetch) == {i for i in found.gpu if not resident[i]}
    check_times(found, rows, costs, ready)


def check_times(found: Assignment, rows: tuple[int, ...], costs: ExpertCosts, ready: Ready) -> None:
    """Each resource does one thing at a time, nothing begins before its weights are there."""
    clock = ready.link
    arrived = {}
    for i in found.fetch:
        clock += costs.fetch
        arrived[i] = clock
    assert found.link_end == pytest.approx(clock)
    clock = 0.0
    for i in found.gpu:
        clock = max(clock, arrived.get(i, 0.0)) + costs.gpu(rows[i])
    assert found.gpu_end == pytest.approx(clock)
    work = sum(costs.cpu(rows[i]) for i in found.cpu)
    assert found.cpu_end >= ready.cpu + work - EXACT
    assert found.cpu_end <= ready.cpu + work / (1 - costs.link_load) + EXACT
    if costs.link_load == 0:
        assert found.cpu_end == pytest.approx(ready.cpu + work)
    # No schedule ends before each expert on its better device could.
    least = max(
        min(
            ready.cpu + costs.cpu(n) + ready.cpu_back,
            costs.gpu(n),
        )
        for n in rows
    )
    assert found.end >= least - EXACT


@given(layer=layers, costs=all_costs, ready=all_ready)
def test_soonest(layer: tuple, costs: ExpertCosts, ready: Ready) -> None:
    """A static placement, and copying all that is absent, are of that shape."""
    end = schedule(*layer, costs, ready).end + EXACT
    for fetched in range(layer[1].count(False) + 1):
        other = schedule(*layer, costs, ready, fetched=fetched).end
        assert end <= other * (1 + EXACT) + 2 * EXACT


def shortest(rows: tuple[int, ...], resident: tuple[bool, ...], costs: ExpertCosts) -> float:
    """Of all assignments; copies in the order of Johnson's rule, which is the best of theirs."""
    best = float("inf")
    ways = [("gpu",) if held else ("cpu", "fetch") for held in resident]
    for devices in product(*ways):
        cpu = sum(costs.cpu(n) for n, d in zip(rows, devices, strict=True) if d == "cpu")
        gpu = sum(costs.gpu(n) for n, d in zip(rows, devices, strict=True) if d == "gpu")
        copied = [costs.gpu(n) for n, d in zip(rows, devices, strict=True) if d == "fetch"]
        link = 0.0
        for gpu_s in sorted(copied, reverse=True):
            link += costs.fetch
            gpu = max(gpu, link) + gpu_s
        best = min(best, max(cpu, gpu))
    return best


small = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=7).map(
    lambda experts: tuple(zip(*experts, strict=True))
)


@given(used=small, cpu=rates, gpu=seconds, fetch=seconds)
def test_best_for_decoding(used: tuple, cpu: Rate, gpu: float, fetch: float) -> None:
    """All experts alike: nothing of any shape ends sooner."""
    resident = used[1]
    rows = (1,) * len(resident)
    costs = ExpertCosts(cpu=cpu, gpu=Rate(0.0, gpu, 0.0), fetch=fetch)
    assert schedule(rows, resident, costs).end == pytest.approx(shortest(rows, resident, costs))


def test_near_the_best_for_prompts() -> None:
    """Random layers whose loads differ, at costs like those of a small GPU."""
    random = np.random.default_rng(0)
    costs = ExpertCosts(cpu=Rate(8, 55, 7), gpu=Rate(10, 11, 1), fetch=220)
    ratios = []
    for _ in range(150):
        count = int(random.integers(3, 9))
        rows = tuple(int(n) for n in random.geometric(1 / 32, count))
        resident = tuple(bool(r) for r in random.random(count) < 0.3)
        best = shortest(rows, resident, costs)
        ratios.append(schedule(rows, resident, costs).end / best)
    assert np.mean(ratios) < 1.06
    assert max(ratios) < 1.6


def test_slow_link() -> None:
    """Copies take three times what the CPU needs: of four misses one is copied."""
    costs = ExpertCosts(cpu=Rate(0, 75, 75), gpu=Rate(0, 20, 1), fetch=221)
    found = schedule([1] * 8, [True] * 4 + [False] * 4, costs)
    assert len(found.fetch) == 1
    assert found.end == 241
    assert found.gpu[-1] == found.fetch[0]
    # A link that is busy for long is not waited for.
    busy = schedule([1] * 8, [True] * 4 + [False] * 4, costs, Ready(link=500))
    assert busy.fetch == []
    assert busy.end == 300


def test_ties_go_to_the_gpu() -> None:
    costs = ExpertCosts(cpu=Rate(0, 10, 0), gpu=Rate(0, 10, 0), fetch=0.0)
    assert schedule([1], [True], costs).gpu == [0]
    assert schedule([1], [False], costs).fetch == [0]


def test_way_back() -> None:
    costs = ExpertCosts(cpu=Rate(0, 10, 0), gpu=Rate(0, 2, 0), fetch=10)
    assert schedule([1], [False], costs).cpu == [0]
    assert schedule([1], [False], costs, Ready(cpu_back=5)).gpu == [0]


def test_arrays() -> None:
    costs = ExpertCosts(cpu=Rate(0, 10, 1), gpu=Rate(0, 2, 1), fetch=30)
    rows, resident = np.array([3, 1, 9]), np.array([True, False, False])
    assert schedule(rows, resident, costs) == schedule([3, 1, 9], [True, False, False], costs)


def test_link_load() -> None:
    costs = ExpertCosts(cpu=Rate(0, 10, 0), gpu=Rate(0, 1, 0), fetch=20, link_load=0.5)
    found = schedule([1, 1], [False, False], costs, fetched=1)
    assert found.cpu_end == 20  # half as fast for as long as it takes
    assert schedule([1] * 4, [False] * 4, costs, fetched=1).cpu_end == 40
    assert schedule([1, 1], [False, False], replace(costs, link_load=0.0), fetched=1).cpu_end == 10
