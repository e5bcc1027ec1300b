"""Belady's optimum: no policy has more hits, and no other choice of what to keep either."""

from __future__ import annotations

from functools import cache as memoized
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.moe.hit_rates import belady, hit_rates
from benchmarks.moe.routing_trace import RoutingTrace
from tests.offload.experts.routing import random_trace, traces


@settings(max_examples=60)
@given(trace=traces, capacity=st.integers(1, 20))
def test_no_policy_is_better(trace: RoutingTrace, capacity: int) -> None:
    rates = hit_rates(trace, capacity)
    assert max(rates.values()) == rates["belady"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_nothing_is_better(seed: int, capacity: int) -> None:
    """Against trying every set to keep after every step."""
    trace = random_trace(layers=2, count=3, used=1, passes=(1, 2, 1, 1, 1), skew=0.3, seed=seed)
    asked = [
        frozenset((step.layer, int(e)) for e in step.experts[:, :1].ravel())
        for step in trace.steps()
    ]

    @memoized
    def most(step: int, held: frozenset[tuple[int, int]]) -> int:
        if step == len(asked):
            return 0
        options = held | asked[step]
        kept = min(capacity, len(options))
        return len(held & asked[step]) + max(
            most(step + 1, frozenset(choice)) for choice in combinations(sorted(options), kept)
        )

    assert belady(trace, capacity).hits == most(0, frozenset())


def test_room_for_all_misses_only_what_is_new() -> None:
    trace = random_trace()
    best = belady(trace, 24)
    distinct = {(s.layer, e) for s in trace.steps() for e in s.experts[0, :2].tolist()}
    assert best.demands - best.hits == len(distinct)
