"""A card that does everything as late as it may: what does not wait for an event shows.

It has CUDA's streams and events, and the CPU's kernels. A copy's bytes arrive when somebody waits
for its event, and are read from the source no sooner than that allows. Memory without contents that
anybody may read is full of a pattern. Kernels run at once; that a copy may overwrite what they have
read is checked by the events that it waits for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from localrt.models.timing import Mark
from localrt.offload.cards.accelerator import Accelerator, Bytes
from localrt.offload.cards.clock import WallClock
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["POISON", "LateAccelerator"]

POISON = 0xA7
"""Every byte of memory that holds nothing."""


@dataclass(frozen=True, slots=True)
class _Event:
    """So many ``copies`` have been carried out, or so many ``kernels`` marked, of each stream."""

    copies: int = 0
    kernels: int = 0


@dataclass(slots=True, eq=False)
class _Copy:
    """``number`` counts from 1. ``waited``: the host has waited for it: its source may change."""

    number: int
    source: Bytes
    out: Bytes
    waited: bool


class LateAccelerator(Accelerator):
    """See ``Accelerator``. ``faults`` are the races found so far, in words."""

    def __init__(self, clock: WallClock, ops: Ops, *, capacity: int) -> None:
        super().__init__(clock, ops, name="late card", capacity=capacity)
        self.faults: list[str] = []
        self._turn = threading.RLock()
        self._copies: list[_Copy] = []  # on their way, in order
        self._issued = 0
        self._kernels = 0  # marks of the kernels' stream
        self._awaited = 0  # of these, those that the copies' stream has waited for
        self._reads: list[tuple[Bytes, int]] = []  # by kernels, up to which mark

    def settled(self, mark: Mark) -> None:
        """See ``Accelerator``."""
        self._carry_out(mark)

    def ended(self, mark: Mark) -> bool:
        """See ``Accelerator``."""
        with self._turn:
            pending = self._copies and isinstance(mark, _Event)
            return not pending or mark.copies < self._copies[0].number

    def wait(self, mark: Mark) -> None:
        """See ``Accelerator``."""
        self._carry_out(mark)

    def mark(self, ended: Mark, *read: Any, last: bool = False) -> Mark:
        """See ``Accelerator``."""
        with self._turn:
            self._kernels += 1
            for memory in read:
                self._reads.append((memory, self._kernels))
                if last:
                    memory[:] = POISON
            return _Event(kernels=self._kernels)

    def to_card(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``."""
        return x.copy(), after

    def to_host(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``."""
        return x.copy(), after

    def free(self, memory: Any) -> None:
        """See ``Accelerator``."""
        super().free(memory)
        with self._turn:
            if any(not c.waited and _overlap(c.out, memory) for c in self._copies):
                self.faults.append("memory of the card was freed while it was copied to")
            self._forget(memory)
            memory[:] = POISON

    def free_host(self, memory: Bytes) -> int:
        """See ``Accelerator``."""
        with self._turn:
            if any(_overlap(copy.source, memory) for copy in self._copies):
                self.faults.append("RAM was freed while it was copied from")
            memory[:] = POISON
        return super().free_host(memory)

    def _alloc(self, nbytes: int) -> Bytes:
        memory = aligned_buffer(nbytes)
        memory[:] = POISON
        with self._turn:
            self._forget(memory)
            self._awaited = self._kernels  # as CUDA's: kernels may be reading what was there
        return memory

    def _copy(self, source: Bytes, out: Any, after: Mark, there: Mark, wait: bool) -> Mark:
        with self._turn:
            if isinstance(after, _Event):
                self._awaited = max(self._awaited, after.kernels)
            self._reads = [read for read in self._reads if read[1] > self._awaited]
            if any(_overlap(out, memory) for memory, _ in self._reads):
                self.faults.append("a copy does not wait for the kernels that read what was there")
            out[:] = POISON
            self._issued += 1
            data = source.copy() if wait else source
            self._copies.append(_Copy(self._issued, data, out, wait))
            return _Event(self._issued, self._awaited)

    def _carry_out(self, mark: Mark) -> None:
        """The copies up to a mark."""
        if not isinstance(mark, _Event):
            return
        with self._turn:
            while self._copies and self._copies[0].number <= mark.copies:
                copy = self._copies.pop(0)
                copy.out[:] = copy.source

    def _forget(self, memory: Bytes) -> None:
        self._copies = [copy for copy in self._copies if not _overlap(copy.out, memory)]
        self._reads = [read for read in self._reads if not _overlap(read[0], memory)]


def _overlap(a: Bytes, b: Bytes) -> bool:
    """Whether two flat arrays share a byte."""
    first, second = a.ctypes.data, b.ctypes.data
    return bool(first < second + b.nbytes and second < first + a.nbytes)
