"""The ring: whole units in one piece, no live byte overwritten, no sequence of units stuck."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from localrt.common.files import PAGE
from localrt.offload.ring import Lease, Ring, UnitChunk, fixed_places


class RingMachine(RuleBasedStateMachine):
    """A reader and a consumer in any order. A page holds the number of its writer."""

    def __init__(self) -> None:
        super().__init__()
        self.pages, self.chunk = 12, 2
        self.ring = Ring(self.pages * PAGE, self.chunk * PAGE)
        self.live: list[tuple[int, Lease, set[int]]] = []  # number, lease, pages written
        self.count = 0

    def write(self, number: int, lease: Lease, written: set[int], chunk: UnitChunk) -> None:
        assert 0 < chunk.nbytes <= self.chunk * PAGE
        assert chunk.start % PAGE == chunk.nbytes % PAGE == 0
        start, stop = chunk.start // PAGE, (chunk.start + chunk.nbytes) // PAGE
        assert stop * PAGE <= lease.nbytes
        assert not written & set(range(start, stop)), "a chunk is handed out once"
        for _, other, _ in self.live:
            if other is lease:
                break
            assert not other.overlaps(lease.offset + start * PAGE, lease.offset + stop * PAGE)
        written |= set(range(start, stop))
        self.ring.view(lease)[start * PAGE : stop * PAGE] = number % 256

    def is_whole(self, number: int, lease: Lease, written: set[int]) -> bool:
        if len(written) * PAGE < lease.nbytes:
            return False
        assert (self.ring.view(lease) == number % 256).all(), "somebody wrote over it"
        return True

    @property
    def newest_is_open(self) -> bool:
        return bool(self.live) and bool(self.live[-1][1].waiting)

    @precondition(lambda self: not self.newest_is_open)
    @rule(pages=st.integers(1, 12))
    def take(self, pages: int) -> None:
        lease = self.ring.lease(pages * PAGE)
        if lease is None:
            assert self.live, "an empty ring has room for every unit"
            return
        self.count += 1
        assert 0 <= lease.offset <= lease.offset + pages * PAGE <= self.ring.nbytes
        assert len(self.ring.view(lease)) == pages * PAGE
        self.live.append((self.count, lease, set()))
        found = self.ring.next_chunk(lease)
        assert found is not None, "a lease is given only if something of it can be read"
        self.write(*self.live[-1], found[0])

    @precondition(lambda self: self.newest_is_open)
    @rule()
    def fill(self) -> None:
        number, lease, written = self.live[-1]
        found = self.ring.next_chunk(lease)
        if found is None:
            assert len(self.live) > 1, "alone in the ring it can be read whole"
            return
        self.write(number, lease, written, found[0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        whole = [entry for entry in self.live if self.is_whole(*entry)]
        if whole:
            entry = data.draw(st.sampled_from(whole))
            self.ring.release(entry[1])
            self.live.remove(entry)
            with pytest.raises(ValueError, match="given back before"):
                self.ring.release(entry[1])

    @invariant()
    def what_is_whole_is_never_written_over(self) -> None:
        for entry in self.live:
            self.is_whole(*entry)


TestRing = RingMachine.TestCase
TestRing.settings = settings(stateful_step_count=40)


@given(unit=st.integers(2, 12), slack=st.integers(1, 12), turns=st.integers(2, 9))
def test_filled_while_computing(unit: int, slack: int, turns: int) -> None:
    slack = min(slack, unit)
    ring = Ring((unit + slack) * PAGE, PAGE)

    def fill(lease: Lease) -> int:
        found = iter(lambda: ring.next_chunk(lease), None)
        return sum(chunk.nbytes for chunk, _ in found)

    before = ring.lease(unit * PAGE)
    assert before is not None
    assert fill(before) == unit * PAGE
    for _ in range(turns):
        lease = ring.lease(unit * PAGE)
        assert lease is not None
        early = fill(lease)
        assert early == slack * PAGE
        ring.release(before)
        assert early + fill(lease) == unit * PAGE
        before = lease


def test_fixed_places() -> None:
    """At the end of what came before, else where the oldest units are."""
    assert fixed_places([3, 3, 3, 3], 10) == [0, 3, 6, 0]
    assert fixed_places([4, 5, 3, 9], 10) == [0, 4, 0, 1]
    assert fixed_places([10, 10], 10) == [0, 0]
    assert fixed_places([], 10) == []


@given(
    units=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    slack=st.integers(0, 12),
    chunk=st.integers(1, 5),
)
def test_events(units: list[int], slack: int, chunk: int) -> None:
    """Events are those of one stream: numbers that grow."""
    ring = Ring((max(units) + slack) * PAGE, chunk * PAGE)
    used = np.zeros(ring.nbytes // PAGE)  # when each page was used last

    def pages(offset: int, nbytes: int) -> slice:
        return slice(offset // PAGE, (offset + nbytes) // PAGE)

    def take(lease: Lease) -> None:
        while (found := ring.next_chunk(lease)) is not None:
            part, event = found
            assert (event or 0) == used[pages(lease.offset + part.start, part.nbytes)].max()

    live = deque[tuple[Lease, Any]]()
    for event, size in enumerate(units, 1):
        lease = None
        while lease is None or lease.waiting:
            lease = lease or ring.lease(size * PAGE)
            if lease is not None:
                take(lease)
            if lease is None or lease.waiting:
                older, ended = live.popleft()
                ring.release(older, ended)
                used[pages(older.offset, older.nbytes)] = ended
        live.append((lease, event))
