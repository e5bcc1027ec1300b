"""A draft's work on a virtual card's clock: what is charged, and where its memory ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localrt.drafts.model import CacheRoom, DraftTime, EngineDrafter
from localrt.errors import CancelledError
from localrt.offload.cards.clock import VirtualClock
from localrt.offload.planner.draft_costs import DraftCosts
from localrt.quant.ops.protocol import Batch
from localrt.speculative import tree_source
from localrt.speculative.source import DraftFailedError, Rows
from localrt.speculative.tree_source import TreeSource
from tests.planner.models import machine, shape

VOCAB = 4000
COSTS = DraftCosts(shape(layers=2, head=1), machine(gpu=True), True)


@pytest.fixture(autouse=True)
def _hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only sleeping moves: computing and waiting for a processor take none."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)


class Cache:
    """As much of a cache as passes need."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0

    def trim(self, length: int) -> int:
        self.length = length
        return length

    def select(self, first: int, rows: Sequence[int]) -> None:
        self.length = first + len(rows)

    @property
    def nbytes(self) -> int:
        return 10 * self.length


class Engine:
    """Computes nothing, slowly."""

    ops_name = "native"

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds
        self.fails = False

    def cache(self, capacity: int) -> Any:
        return Cache(capacity)

    def run(
        self, batch: Batch, *, rows: Sequence[int] | None = None, check: Any = None
    ) -> np.ndarray:
        time.sleep(self.seconds)
        if self.fails:
            raise CancelledError("stop")
        for span in batch.spans:
            span.cache.length += span.rows  # type: ignore[attr-defined]
        wanted = len(batch.tokens) if rows is None else len(rows)
        return np.zeros((wanted, VOCAB), np.float32)


def made(seconds: float = 0.02, **options: Any) -> tuple[Any, Any]:
    """A drafter and its engine."""
    engine: Any = Engine(seconds)
    return EngineDrafter(engine, VOCAB, **options), engine


def extend(drafter: EngineDrafter, cache: Any, count: int, *, last: bool = True) -> np.ndarray:
    rows = Rows([1] * count, np.arange(cache.length, cache.length + count), int(last))
    logits: np.ndarray = drafter.compute(cache, rows, check=None)
    return logits


def test_a_pass_on_the_card_takes_what_the_card_would_take() -> None:
    clock = VirtualClock()
    drafter, _ = made(time=DraftTime(clock, COSTS))
    cache = drafter.cache(100)
    assert extend(drafter, cache, 3).shape == (1, VOCAB)
    expected = COSTS.there(3) + COSTS.computing(3, 1, 0) + COSTS.back(1)
    assert clock.now() == pytest.approx(expected)
    assert clock.now() < 0.01 < time.perf_counter()  # of real time
    extend(drafter, cache, 4)
    more = COSTS.there(4) + COSTS.computing(4, 1, 3) + COSTS.back(1)
    assert clock.now() == pytest.approx(expected + more)


def test_without_logits_the_cpu_waits_for_nothing() -> None:
    clock = VirtualClock()
    drafter, _ = made(0, time=DraftTime(clock, COSTS))
    extend(drafter, drafter.cache(100), 3, last=False)
    assert clock.now() == pytest.approx(COSTS.there(3) + COSTS.computing(3, 0, 0))


def test_a_slower_card_takes_longer() -> None:
    slow = machine(gpu=True, link=1e9)
    assert slow.gpu is not None
    slow = replace(slow, gpu=replace(slow.gpu, bytes_s=1e9))
    times = []
    for costs in (COSTS, DraftCosts(COSTS.shape, slow, True)):
        clock = VirtualClock()
        drafter, _ = made(0, time=DraftTime(clock, costs))
        extend(drafter, drafter.cache(100), 3)
        times.append(clock.now())
    assert times[1] > 5 * times[0]


def test_a_pass_on_the_cpu_takes_what_it_took() -> None:
    clock = VirtualClock()
    drafter, _ = made(time=DraftTime(clock))
    extend(drafter, drafter.cache(100), 3)
    assert clock.now() == pytest.approx(0.02)


@pytest.mark.parametrize("costs", [COSTS, None])
def test_a_pass_that_is_cancelled_leaves_the_clock_going(costs: DraftCosts | None) -> None:
    clock = VirtualClock()
    drafter, engine = made(time=DraftTime(clock, costs))
    cache = drafter.cache(100)
    engine.fails = True
    with pytest.raises(CancelledError):
        extend(drafter, cache, 1)
    engine.fails = False
    before = clock.now()
    extend(drafter, cache, 1)
    assert clock.now() > before


def test_what_drafting_takes_beside_its_passes_is_the_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = VirtualClock(keep=10)
    drafter, _ = made(0.05, time=DraftTime(clock, COSTS))  # which is not the card's time
    source = TreeSource(drafter, capacity=100)
    likeliest = tree_source.likeliest

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return likeliest(*args, **options)

    monkeypatch.setattr(tree_source, "likeliest", slow)
    assert len(source.propose([3], 1, 1)) == 1
    on_card = COSTS.there(1) + COSTS.computing(1, 1, 0) + COSTS.back(1)
    assert clock.now() == pytest.approx(on_card + 0.02)
    assert {task.resource for task in clock.tasks()} == {"cpu", "gpu"}
    # It drafts between passes only: two threads would share one virtual clock.
    assert not source.prepares
    assert TreeSource(made()[0], capacity=100).prepares


def test_caches_stay_within_their_room() -> None:
    drafter, _ = made(0, room=CacheRoom(lambda length: 10 * length, 100))
    one = drafter.cache(100)
    extend(drafter, one, 6)
    other = drafter.cache(100)
    extend(drafter, other, 4)
    with pytest.raises(DraftFailedError, match="110 B of the card's memory, and 100 B were set"):
        extend(drafter, one, 1)
    del other
    extend(drafter, one, 4)
    with pytest.raises(DraftFailedError):
        extend(drafter, one, 1)
