"""A fixed, page-aligned ring buffer for streamed units.

A unit lies contiguously. It is read in chunks, each as soon as its target bytes are free, so a ring
only a little larger than its largest unit keeps the disk busy while that unit is computed. Nothing
is allocated after construction, and nothing can fragment. Not thread-safe; it knows sizes and
offsets, not files or weights.

A release may carry a GPU's event; the next writer to those bytes waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, cast

from localrt.common.files import PAGE
from localrt.offload.device.gpu import Event
from localrt.quant.ops.arrays import MemoryT, aligned_buffer

COPY_BLOCK = 16 << 20
"""Bytes of a copy over the link, if there is room for so many at once."""


@dataclass(frozen=True, slots=True)
class UnitChunk:
    """``nbytes`` of a unit, ``start`` bytes into it."""

    start: int
    nbytes: int


@dataclass(slots=True)
class RingSpan:
    """``nbytes`` at ``offset`` of a ring."""

    offset: int
    nbytes: int

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it covers any byte from ``start`` to ``stop``."""
        return self.offset < stop and start < self.offset + self.nbytes


@dataclass(slots=True)
class Lease(RingSpan):
    """A unit's place in the ring. ``waiting`` are the chunks not begun yet."""

    waiting: deque[UnitChunk] = field(default_factory=deque)
    released: bool = False


class Ring(Generic[MemoryT]):
    """A buffer of ``nbytes`` for units of at most that size, in chunks of at most ``chunk`` bytes.

    ``memory``, anything that can be sliced by bytes, is used instead of newly allocated RAM.
    ``free`` is called with it when the ring is replaced.
    """

    def __init__(
        self,
        nbytes: int,
        chunk: int = 2 << 20,
        memory: MemoryT | None = None,
        *,
        free: Callable[[MemoryT], object] = lambda memory: None,
    ) -> None:
        if nbytes % PAGE or chunk % PAGE or chunk <= 0:
            raise ValueError(f"ring ({nbytes}) and chunk ({chunk}) must be multiples of {PAGE}")
        self.nbytes = nbytes
        self.memory = cast(MemoryT, aligned_buffer(nbytes)) if memory is None else memory
        self._chunk = chunk
        self._free = free
        self._next = 0  # where the next unit goes if it fits
        self._live: deque[Lease] = deque()  # oldest first
        # Events of released ranges, oldest first; ranges do not overlap, so they are few.
        self._events: list[tuple[int, int, Event]] = []

    def replaced(self) -> None:
        """Free the memory: the ring was replaced and no unit is in it."""
        memory = self.memory
        del self.memory
        self._free(memory)

    def lease(self, nbytes: int, at: int | None = None) -> Lease | None:
        """A place for a unit, after the newest one or at byte ``at``; None while none of its bytes
        are free.

        Raises:
            ValueError: the unit is larger than the ring, or not whole pages.
        """
        if not 0 < nbytes <= self.nbytes or nbytes % PAGE:
            raise ValueError(f"a unit of {nbytes} bytes does not fit a ring of {self.nbytes}")
        if not self._live:
            self._next = 0
        units = [unit for unit in self._live if not unit.released]
        offset, first = place(nbytes, self.nbytes, units, at=self._next, fixed=at)
        lease = Lease(offset, nbytes, deque(chunks(nbytes, self._chunk, first=first)))
        if not lease.waiting or not self._is_free(lease, lease.waiting[0]):
            return None
        # After a unit that ends at the ring's end, the next goes to the ring's beginning.
        self._next = offset + nbytes if offset + nbytes < self.nbytes else 0
        self._live.append(lease)
        return lease

    def next_chunk(self, lease: Lease) -> tuple[UnitChunk, Event | None] | None:
        """Hand out the lease's next chunk, once, if its target bytes are free.

        Also returns the event after which nobody uses those bytes: the latest of the stream.
        """
        if not lease.waiting or not self._is_free(lease, lease.waiting[0]):
            return None
        chunk = lease.waiting.popleft()
        start = lease.offset + chunk.start
        stop = start + chunk.nbytes
        used = (event for low, high, event in reversed(self._events) if low < stop and start < high)
        return chunk, next(used, None)

    def view(self, lease: Lease) -> MemoryT:
        """The unit's bytes: a slice of the memory."""
        return self.memory[lease.offset : lease.offset + lease.nbytes]

    def release(self, lease: Lease, event: Event | None = None) -> None:
        """Release a lease's bytes, once ``event`` has happened. No chunk of it may be in flight.

        Raises:
            ValueError: the lease was released before.
        """
        if lease.released:
            raise ValueError("the lease was given back before")
        lease.released = True
        if event is not None:
            self._note(lease.offset, lease.offset + lease.nbytes, event)
        while self._live and self._live[0].released:
            self._live.popleft()

    def _note(self, start: int, stop: int, event: Event) -> None:
        """Note that these bytes are free after ``event``, which follows their earlier events."""
        events: list[tuple[int, int, Event]] = []
        for low, high, before in self._events:
            if low < start:
                events.append((low, min(high, start), before))
            if stop < high:
                events.append((max(low, stop), high, before))
        self._events = [*events, (start, stop, event)]

    def _is_free(self, lease: Lease, chunk: UnitChunk) -> bool:
        """Whether no older lease covers the bytes of ``chunk``."""
        start = lease.offset + chunk.start
        for other in self._live:
            if other is lease:
                break
            if not other.released and other.overlaps(start, start + chunk.nbytes):
                return False
        return True


def newest(units: Sequence[RingSpan], start: int, stop: int) -> int:
    """How many of ``units``, oldest first, there are up to the newest that covers any byte from
    ``start`` to ``stop``; 0 if none does.
    """
    for count in range(len(units), 0, -1):
        if units[count - 1].overlaps(start, stop):
            return count
    return 0


def place(
    nbytes: int, ring: int, units: Sequence[RingSpan], *, at: int, fixed: int | None = None
) -> tuple[int, int]:
    """Choose a unit's place in a ring of ``ring`` bytes that holds ``units``, oldest first, and
    whose free bytes begin ``at``, unless it is ``fixed``.

    Returns its offset, and which of its bytes to read first.
    """
    if fixed is not None:
        return fixed, at - fixed if fixed < at < fixed + nbytes else 0
    end = ring - nbytes
    if at <= end:
        return at, 0
    # It does not fit there. Choose what is free sooner: the beginning, if its units are older,
    # or the end, where the bytes that are free already are filled at once.
    if newest(units, 0, nbytes) < newest(units, end, ring):
        return 0, 0
    return end, at - end


def fixed_places(sizes: Sequence[int], ring: int) -> list[int]:
    """The offsets of units in a ring of ``ring`` bytes that each round begins at 0, placed one
    after another as if none were released meanwhile.
    """
    units: list[RingSpan] = []
    at = 0
    for nbytes in sizes:
        offset, _ = place(nbytes, ring, units, at=at)
        units.append(RingSpan(offset, nbytes))
        at = offset + nbytes if offset + nbytes < ring else 0
    return [unit.offset for unit in units]


def chunks(nbytes: int, size: int, *, first: int) -> list[UnitChunk]:
    """A unit's chunks; those from byte ``first`` on come before the others."""
    cuts = sorted({*range(0, nbytes, size), first, nbytes})
    pieces = [UnitChunk(a, b - a) for a, b in pairwise(cuts)]
    return sorted(pieces, key=lambda chunk: (chunk.start < first, chunk.start))
