"""Reading and computing from an SSD: the order is the best there is."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.offload.experts.assignment import Rate
from localrt.offload.experts.misses import order_misses

layers = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(
    layer=layers,
    cpu=st.builds(Rate, st.floats(0, 2), st.floats(0.1, 5), st.floats(0, 1)),
    read_s=st.floats(0.1, 20),
    cpu_free=st.floats(0, 20),
    disk_free=st.floats(0, 20),
)
def test_no_order_ends_sooner(
    layer: list[tuple[int, bool]], cpu: Rate, read_s: float, cpu_free: float, disk_free: float
) -> None:
    rows, resident = [n for n, _ in layer], [held for _, held in layer]
    plan = order_misses(
        rows, resident, cpu=cpu, read_s=read_s, cpu_free=cpu_free, disk_free=disk_free
    )
    best = float("inf")
    for order in permutations(range(len(rows))):
        clock, read = cpu_free, disk_free
        for i in order:
            if not resident[i]:
                read += read_s
                clock = max(clock, read)
            clock += cpu.at(rows[i])
        best = min(best, clock)
    assert plan.end == pytest.approx(best)
    assert sorted(plan.computes) == list(range(len(rows)))
    assert sorted(plan.reads) == [i for i, held in enumerate(resident) if not held]
    assert plan.end == max(plan.ends)
    assert plan.end == pytest.approx(cpu_free + sum(map(cpu.at, rows)) + plan.waited)


def test_cached_experts_hide_the_first_reads() -> None:
    cpu = Rate(0, 2, 0)
    plan = order_misses([1, 1, 1, 1], [False, True, False, True], cpu=cpu, read_s=3)
    assert plan.computes == [1, 3, 0, 2]
    assert plan.ends == [6, 2, 8, 4]
    assert plan.waited == 0
