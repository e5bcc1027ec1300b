"""Loads ahead of demand: their sources, their queue, and whether they pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.offload.experts.prefetch import (
    LoadQueue,
    PredictionMeter,
    PrefetchSources,
    PreviousExperts,
    gate_candidates,
    prefetch_pays,
)
from localrt.offload.experts.transitions import TransitionTable


def test_every_source_is_off_until_it_is_shown_to_pay() -> None:
    assert PrefetchSources() == PrefetchSources(gates=False, previous=False, transitions=False)


def test_candidates_are_absent_experts_best_first() -> None:
    scores = np.array([[0.5, 0.1, 0.3, 0.0], [0.2, 0.4, 0.3, 0.0]])
    resident = np.array([True, False, False, False])
    found = gate_candidates(scores, resident, most=3)
    assert [expert for expert, _ in found] == [2, 1]
    assert found[0][1] == pytest.approx(0.6)
    assert gate_candidates(scores[0], resident, most=1) == [(2, pytest.approx(0.3))]
    assert gate_candidates(scores, np.ones(4, bool), most=3) == []


def test_previous_experts() -> None:
    previous = PreviousExperts(2, 4)
    previous.note(1, np.array([0, 3]), np.array([1, 4]))
    assert previous.predict(1).tolist() == [0.25, 0, 0, 1]
    previous.note(1, np.array([2]), np.array([1]))
    assert previous.predict(1).tolist() == [0, 0, 1, 0]
    assert previous.predict(0).tolist() == [0, 0, 0, 0]


def test_transitions_learn_what_follows_what() -> None:
    table = TransitionTable(3, 4, 1)
    for expert in (0, 1, 2, 3):
        for _ in range(3):
            table.note(1, np.array([[expert]]), np.array([[(expert + 1) % 4]]))
    table.note(1, np.array([[0], [0], [0]]), np.array([[2], [2], [2]]))
    assert table.predict(1, np.array([1])).tolist() == [0, 0, 1, 0]
    assert table.predict(1, np.array([0])).tolist() == pytest.approx([0, 0.5, 0.5, 0])
    assert table.predict(1, np.array([0, 1])).tolist() == pytest.approx([0, 0.25, 0.75, 0])
    assert table.predict(2, np.array([0])).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="layer 0"):
        table.predict(0, np.array([0]))


def test_one_pass_of_many_rows_counts_like_many_of_one() -> None:
    random = np.random.default_rng(0)
    before = np.argsort(random.random((20, 6)), axis=1)[:, :2]
    after = np.argsort(random.random((20, 6)), axis=1)[:, :2]
    whole, rows = TransitionTable(2, 6, 2), TransitionTable(2, 6, 2)
    whole.note(1, before, after)
    for row in range(20):
        rows.note(1, before[row : row + 1], after[row : row + 1])
    for expert in range(6):
        ours = whole.predict(1, np.array([expert]))
        assert np.allclose(ours, rows.predict(1, np.array([expert])))
        assert ours.sum() == pytest.approx(2)  # two of them follow


def test_transitions_forget() -> None:
    table = TransitionTable(2, 2, 1)
    many = np.zeros((4096, 1), int)
    table.note(1, many, many)
    for _ in range(3):
        table.note(1, many, many + 1)
    assert table.predict(1, np.array([0]))[1] > 0.85


def measured(right: int, of: int) -> PredictionMeter:
    meter = PredictionMeter()
    for number in range(of):
        meter.predict(0, [1])
        meter.observe(0, np.array([1 if number < right else 2]))
    return meter


def test_prefetch_pays_only_where_it_was_measured_to() -> None:
    good, bad = measured(700, 1000), measured(100, 1000)
    assert good.precision == 0.7
    link = {"fetch_s": 200e-6, "saved_s": 75e-6}
    assert prefetch_pays(good, idle_s=300e-6, **link)  # the link would rest
    assert not prefetch_pays(good, idle_s=0.0, **link)  # the link is the bottleneck
    assert not prefetch_pays(bad, idle_s=300e-6, victim_use=0.2, **link)
    assert not prefetch_pays(measured(10, 10), idle_s=1.0, **link)  # too little was seen
    assert not prefetch_pays(PredictionMeter(), idle_s=1.0, **link)


def test_the_meter_forgets() -> None:
    meter = measured(4000, 4000)
    for _ in range(12000):
        meter.predict(0, [1])
        meter.observe(0, np.array([0]))
    assert meter.precision is not None
    assert meter.precision < 0.2


def test_demands_go_first_and_a_proposal_can_become_one() -> None:
    queue = LoadQueue()
    queue.propose(3, 0, gain=0.1, epoch=1)
    queue.propose(3, 1, gain=0.9, epoch=1)
    queue.demand(1, 5, epoch=1)
    queue.demand(3, 0, epoch=1)
    queue.propose(1, 5, gain=9.0, epoch=1)  # is in the queue
    popped = [queue.pop() for _ in range(4)]
    assert [(load.layer, load.expert, load.demanded) for load in popped if load] == [
        (1, 5, True),
        (3, 0, True),
        (3, 1, False),
    ]
    assert popped[3] is None


def test_cancelling() -> None:
    queue = LoadQueue()
    queue.propose(0, 0, gain=1.0, epoch=1)
    queue.demand(0, 1, epoch=1)
    queue.demand(0, 2, epoch=2)
    queue.propose(0, 3, gain=1.0, epoch=3)
    assert {load.expert for load in queue.cancel(1)} == {0, 1}
    assert [load.expert for load in queue.cancel()] == [3]
    assert queue.pop(proposals=False) is not None
    assert queue.pop() is None
    assert len(queue) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["demand", "propose", "cancel", "pop"]),
            st.integers(0, 3),
            st.floats(0, 1),
        ),
        max_size=40,
    )
)
def test_a_proposal_never_goes_before_a_demand(actions: list[tuple[str, int, float]]) -> None:
    queue = LoadQueue()
    demands: list[int] = []
    proposals: set[int] = set()
    for epoch, (action, expert, gain) in enumerate(actions):
        if action == "demand":
            queue.demand(0, expert, epoch=epoch)
            proposals.discard(expert)
            if expert not in demands:
                demands.append(expert)
        elif action == "propose":
            queue.propose(0, expert, gain=gain, epoch=epoch)
            if expert not in demands:
                proposals.add(expert)
        elif action == "cancel":
            queue.cancel()
            proposals.clear()
        else:
            load = queue.pop()
            if demands:
                assert load is not None
                assert load.expert == demands.pop(0)
            elif proposals:
                assert load is not None
                proposals.remove(load.expert)
            else:
                assert load is None
        assert len(queue) == len(demands) + len(proposals)
