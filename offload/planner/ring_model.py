"""The pipeline's ring of slots as the simulation sees it: when the bytes of a unit are free.

Units lie where ``offload/ring.py`` would put them. Here time is a number, and nothing is allocated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from localrt.offload.ring import Chunk, chunks, place


@dataclass(slots=True)
class Slot:
    """A unit's place; ``release`` is when it is given back, known once the unit is used."""

    offset: int
    nbytes: int
    release: float = float("inf")

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it takes any byte of ``start`` to ``stop``."""
        return self.offset < stop and start < self.offset + self.nbytes


class RingModel:
    """``nbytes`` for units, loaded in pieces of ``chunk`` bytes, each as soon as it has room."""

    def __init__(self, nbytes: int, chunk: int) -> None:
        self.nbytes = nbytes
        self._chunk = chunk
        self._live: deque[Slot] = deque()
        self._cut: dict[tuple[int, int], list[Chunk]] = {}  # by bytes, and which come first
        self._next = 0

    def load(self, nbytes: int, free: float, bytes_s: float) -> tuple[Slot, float, float]:
        """Load a unit through a resource that is free from ``free`` on: slot, start, end."""
        while self._live and self._live[0].release <= free:
            self._live.popleft()
        slot, pieces = self._place(nbytes)
        clock = free
        if self._live and (ready := self._ready(slot, pieces[0])) > free:
            # Whoever waits until the ring is empty begins at its beginning.
            if ready >= self._live[-1].release:
                self._live.clear()
                slot, pieces = self._place(nbytes)
            clock = ready
        start = clock
        if self._live:
            for chunk in pieces:
                clock = max(clock, self._ready(slot, chunk)) + chunk.nbytes / bytes_s
        else:
            clock += nbytes / bytes_s
        stop = slot.offset + nbytes
        self._next = stop if stop < self.nbytes else 0
        self._live.append(slot)
        return slot, start, clock

    def release(self, slot: Slot, time: float) -> None:
        """Give back a slot at ``time``; slots come back in the order in which they were taken."""
        slot.release = time
        for older in self._live:
            if older is slot:
                break
            slot.release = max(slot.release, older.release)

    def _place(self, nbytes: int) -> tuple[Slot, list[Chunk]]:
        if nbytes > self.nbytes:
            raise ValueError(f"a unit of {nbytes} bytes does not fit a ring of {self.nbytes}")
        if not self._live:
            self._next = 0
        offset, first = place(nbytes, self.nbytes, at=self._next, newest=self._newest)
        slot = Slot(offset, nbytes)
        if not self._newest(offset, offset + nbytes):
            return slot, [Chunk(0, nbytes)]
        if (nbytes, first) not in self._cut:
            self._cut[nbytes, first] = chunks(nbytes, self._chunk, first=first)
        return slot, self._cut[nbytes, first]

    def _newest(self, start: int, stop: int) -> int:
        """How many slots are as old as the newest that takes bytes of ``start`` to ``stop``."""
        for count in range(len(self._live), 0, -1):
            if self._live[count - 1].overlaps(start, stop):
                return count
        return 0

    def _ready(self, slot: Slot, chunk: Chunk) -> float:
        """When the bytes of a piece are free."""
        start = slot.offset + chunk.start
        stop = start + chunk.nbytes
        ready = 0.0
        for other in self._live:
            if other.release > ready and other.overlaps(start, stop):
                ready = other.release
        return ready
