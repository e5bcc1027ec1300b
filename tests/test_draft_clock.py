"""A draft's work on a virtual card's clock: what is charged, and where its memory ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localrt.drafts.clock import (
    CardDraftDecoder,
    ClockedSource,
    HostDraftDecoder,
    RoomyDraftDecoder,
)
from localrt.errors import CancelledError
from localrt.offload.cards.clock import VirtualClock
from localrt.offload.planner.draft_costs import DraftCosts
from localrt.offload.trace import Trace
from localrt.quant.ops.protocol import Batch
from localrt.speculative.source import AheadSource, DraftFailedError
from localrt.speculative.tree import TokenTree
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

    @property
    def nbytes(self) -> int:
        return 10 * self.length


class Decoder:
    """Computes nothing, slowly."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds
        self.fails = False

    def cache(self, capacity: int) -> Any:
        return Cache(capacity)

    def forward(
        self, batch: Batch, *, rows: Sequence[int] | None = None, check: Any = None
    ) -> np.ndarray:
        time.sleep(self.seconds)
        if self.fails:
            raise CancelledError("stop")
        for span in batch.spans:
            span.cache.length += span.rows  # type: ignore[attr-defined]
        wanted = len(batch.tokens) if rows is None else len(rows)
        return np.zeros((wanted, VOCAB), np.float32)


def extend(decoder: Any, cache: Any, count: int, rows: Sequence[int] | None = None) -> np.ndarray:
    logits: np.ndarray = decoder.forward(Batch.extend([(cache, [1] * count)]), rows=rows)
    return logits


def test_a_pass_on_the_card_takes_what_the_card_would_take() -> None:
    clock = VirtualClock(Trace())
    decoder = CardDraftDecoder(Decoder(), clock, COSTS)
    cache = decoder.cache(100)
    assert extend(decoder, cache, 3, [2]).shape == (1, VOCAB)
    expected = COSTS.there(3) + COSTS.computing(3, 1, 0) + COSTS.back(1)
    assert clock.now() == pytest.approx(expected)
    assert clock.now() < 0.01 < decoder.seconds  # of real time, for whoever counts the rest
    extend(decoder, cache, 4)
    more = COSTS.there(4) + COSTS.computing(4, 4, 3) + COSTS.back(4)
    assert clock.now() == pytest.approx(expected + more)


def test_without_logits_the_cpu_waits_for_nothing() -> None:
    clock = VirtualClock(Trace())
    decoder = CardDraftDecoder(Decoder(0), clock, COSTS)
    extend(decoder, decoder.cache(100), 3, [])
    assert clock.now() == pytest.approx(COSTS.there(3) + COSTS.computing(3, 0, 0))


def test_a_slower_card_takes_longer() -> None:
    slow = machine(gpu=True, link=1e9)
    assert slow.gpu is not None
    slow = replace(slow, gpu=replace(slow.gpu, bytes_s=1e9))
    times = []
    for costs in (COSTS, DraftCosts(COSTS.shape, slow, True)):
        clock = VirtualClock(Trace())
        decoder = CardDraftDecoder(Decoder(0), clock, costs)
        extend(decoder, decoder.cache(100), 3)
        times.append(clock.now())
    assert times[1] > 10 * times[0]


def test_a_pass_on_the_cpu_takes_what_it_took() -> None:
    clock = VirtualClock(Trace())
    decoder = HostDraftDecoder(Decoder(), clock)
    extend(decoder, decoder.cache(100), 3)
    assert clock.now() == pytest.approx(0.02)


def test_a_pass_that_is_cancelled_leaves_the_clock_going() -> None:
    clock = VirtualClock(Trace())
    inner = Decoder()
    for decoder in (CardDraftDecoder(inner, clock, COSTS), HostDraftDecoder(inner, clock)):
        cache = decoder.cache(100)
        inner.fails = True
        with pytest.raises(CancelledError):
            extend(decoder, cache, 1)
        inner.fails = False
        before = clock.now()
        extend(decoder, cache, 1)
        assert clock.now() > before


class Source:
    """Drafts by one pass and some thinking."""

    name = "model"

    def __init__(self, decoder: Any, seconds: float) -> None:
        self.decoder, self.seconds = decoder, seconds
        self.cache = decoder.cache(100)
        self.begun: list[int] = []
        self.closed = False

    def begin(self, history: Sequence[int]) -> None:
        self.begun = list(history)

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Any = None
    ) -> TokenTree:
        extend(self.decoder, self.cache, 1)
        time.sleep(self.seconds)
        return TokenTree.of([1], [-1], [-0.1], self.name)

    def close(self) -> None:
        self.closed = True


def test_what_drafting_takes_beside_its_passes_is_the_cpus() -> None:
    trace = Trace(keep=10)
    clock = VirtualClock(trace)
    decoder = CardDraftDecoder(Decoder(0.05), clock, COSTS)  # which is not the card's time
    inner = Source(decoder, 0.02)
    source = ClockedSource(inner, decoder, clock)
    source.begin([3])
    assert inner.begun == [3]
    assert len(source.propose([3], 1, 1)) == 1
    on_card = COSTS.there(1) + COSTS.computing(1, 1, 0) + COSTS.back(1)
    assert clock.now() == pytest.approx(on_card + 0.02)
    assert {task.resource for task in trace.tasks()} == {"cpu", "gpu"}
    # It drafts between passes only: two threads would share one virtual clock.
    assert not isinstance(source, AheadSource)
    source.close()
    assert inner.closed


def test_caches_stay_within_their_room() -> None:
    decoder = RoomyDraftDecoder(Decoder(0), lambda length: 10 * length, 100)
    one = decoder.cache(100)
    extend(decoder, one, 6)
    other = decoder.cache(100)
    extend(decoder, other, 4)
    with pytest.raises(DraftFailedError, match="110 B of the card's memory, and 100 B were set"):
        extend(decoder, one, 1)
    del other
    extend(decoder, one, 4)
    with pytest.raises(DraftFailedError):
        extend(decoder, one, 1)
