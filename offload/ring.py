"""A fixed, page-aligned buffer through which units pass: first in, first out.

A unit lies contiguously. It is read in chunks, each as soon as the bytes that it goes to are free:
so a ring only a little larger than its largest unit still keeps the disk busy while that unit is
computed. Nothing is allocated after construction, and nothing can fragment. Not thread-safe; it
knows sizes and offsets, neither files nor weights.
"""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["PAGE", "Chunk", "Lease", "Ring", "aligned_buffer"]

PAGE = 4096
Bytes = npt.NDArray[np.uint8]


def aligned_buffer(nbytes: int) -> Bytes:
    """``nbytes`` of zeros at a page boundary, resident only once touched, in large pages if any.

    The memory goes back to the system when the last view of it is gone.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    region = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 1 << 21:
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return np.frombuffer(region, np.uint8)


@dataclass(frozen=True, slots=True)
class Chunk:
    """``nbytes`` of a unit, ``start`` bytes into it."""

    start: int
    nbytes: int


@dataclass(slots=True)
class Lease:
    """A unit's place in the ring: ``nbytes`` at ``offset``. ``waiting`` are the chunks to come."""

    offset: int
    nbytes: int
    waiting: deque[Chunk] = field(default_factory=deque)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it takes any byte of ``start`` to ``stop``."""
        return self.offset < stop and start < self.offset + self.nbytes


class Ring:
    """``nbytes`` for units of at most ``nbytes`` each; chunks have at most ``chunk`` bytes."""

    def __init__(self, nbytes: int, chunk: int = 2 << 20) -> None:
        if nbytes % PAGE or chunk % PAGE or chunk <= 0:
            raise ValueError(f"ring ({nbytes}) and chunk ({chunk}) must be multiples of {PAGE}")
        self.nbytes = nbytes
        self.memory = aligned_buffer(nbytes)
        self._chunk = chunk
        self._next = 0  # where the next unit goes if it fits
        self._live: deque[Lease] = deque()  # oldest first

    @property
    def used(self) -> int:
        """Bytes that leases cover; overlapping ones count once for each."""
        return sum(lease.nbytes for lease in self._live)

    def lease(self, nbytes: int) -> Lease | None:
        """A place for a unit behind those that are there; None while nothing of it could be read.

        Raises:
            ValueError: it is larger than the ring, or not whole pages.
        """
        if not 0 < nbytes <= self.nbytes or nbytes % PAGE:
            raise ValueError(f"a unit of {nbytes} bytes does not fit a ring of {self.nbytes}")
        if not self._live:
            self._next = 0
        at = self._next
        fits = at + nbytes <= self.nbytes
        # At the end of the ring where it does not fit: what is free there is filled at once.
        offset = at if fits else self.nbytes - nbytes
        lease = Lease(
            offset, nbytes, _chunks(nbytes, self._chunk, first=0 if fits else at - offset)
        )
        if not lease.waiting or not self._is_free(lease, lease.waiting[0]):
            return None
        self._next = at + nbytes if fits else 0
        self._live.append(lease)
        return lease

    def next_chunk(self, lease: Lease) -> Chunk | None:
        """The lease's next chunk if the bytes that it goes to are free; it is handed out once."""
        if lease.waiting and self._is_free(lease, lease.waiting[0]):
            return lease.waiting.popleft()
        return None

    def view(self, lease: Lease) -> Bytes:
        """The unit's bytes."""
        return self.memory[lease.offset : lease.offset + lease.nbytes]

    def release(self, lease: Lease) -> None:
        """Give back the oldest lease.

        Raises:
            ValueError: an older one is still held.
        """
        if not self._live or self._live[0] is not lease:
            raise ValueError("leases are released in the order in which they were taken")
        self._live.popleft()

    def _is_free(self, lease: Lease, chunk: Chunk) -> bool:
        """Whether no older lease covers the bytes of ``chunk``."""
        start = lease.offset + chunk.start
        for other in self._live:
            if other is lease:
                break
            if other.overlaps(start, start + chunk.nbytes):
                return False
        return True


def _chunks(nbytes: int, size: int, *, first: int) -> deque[Chunk]:
    """A unit's chunks; those from byte ``first`` on come before the others."""
    cuts = sorted({*range(0, nbytes, size), first} | {nbytes})
    chunks = [Chunk(a, b - a) for a, b in pairwise(cuts)]
    return deque(sorted(chunks, key=lambda chunk: (chunk.start < first, chunk.start)))
