"""Loads ahead of demand: what is counted of their sources, and whether they pay."""

from __future__ import annotations

import numpy as np
import pytest

from localrt.offload.experts.prefetch import (
    PredictionMeter,
    PrefetchSources,
    prefetch_pays,
)
from localrt.offload.experts.transitions import TransitionTable


def test_every_source_is_off_until_it_is_shown_to_pay() -> None:
    assert PrefetchSources() == PrefetchSources(gates=False, previous=False, transitions=False)


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
    assert not prefetch_pays(good, idle_s=300e-6, cost_s=60e-6, **link)  # reading takes cores
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
