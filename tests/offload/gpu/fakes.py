"""GPUs that are not there: one does everything at once, the other as late as it may.

Both have the CPU's kernels, which run at once. ``LateGpu`` has CUDA's streams and events: a copy's
bytes arrive when somebody waits for its event, and are read from the source no sooner than that
allows; what does not wait for an event shows. Memory without contents that anybody may read is full
of a pattern. That a copy may overwrite what kernels have read is checked by the events that it
waits for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from localrt.offload.device.gpu import Clock, Event, Gpu
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array, aligned_buffer
from localrt.quant.ops.protocol import Ops

__all__ = ["POISON", "FakeGpu", "LateGpu"]

POISON = 0xA7
"""Every byte of memory that holds nothing."""


class FakeGpu(Gpu):
    """Its memory is RAM, which is counted; copies have ended when they are begun."""

    def __init__(self, clock: Clock, ops: Ops, *, capacity: int, name: str = "fake GPU") -> None:
        super().__init__(clock, ops, name=name, capacity=capacity)

    def to_gpu(self, x: Array) -> Array:
        return x

    def to_host(self, x: Array) -> Array:
        return x

    def _alloc(self, nbytes: int) -> Any:
        return aligned_buffer(nbytes)

    def _begin_copy(self, source: Bytes, out: Any, after: Event | None) -> Event | None:
        out[:] = source
        return None


@dataclass(frozen=True, slots=True)
class _Event:
    """So many ``copies`` have been carried out, or so many ``kernels`` marked, of each stream."""

    gpu: LateGpu
    copies: int = 0
    kernels: int = 0

    def query(self) -> bool:
        """Nobody has waited for a later copy."""
        return self.gpu.done_copies >= self.copies

    def synchronize(self) -> None:
        self.gpu.wait(self)


@dataclass(slots=True, eq=False)
class _Copy:
    """``number`` counts from 1."""

    number: int
    source: Bytes
    out: Bytes


class LateGpu(FakeGpu):
    """``faults`` are the races found so far, in words."""

    def __init__(self, clock: Clock, ops: Ops, *, capacity: int) -> None:
        super().__init__(clock, ops, name="late GPU", capacity=capacity)
        self.faults: list[str] = []
        self._turn = threading.RLock()
        self._copies: list[_Copy] = []  # on their way, in order
        self._issued = 0
        self._kernels = 0  # marks of the kernels' stream
        self._awaited = 0  # of these, those that the copies' stream has waited for
        self._reads: list[tuple[Bytes, int]] = []  # by kernels, up to which mark

    @property
    def done_copies(self) -> int:
        """All up to this one have been carried out."""
        with self._turn:
            return self._copies[0].number - 1 if self._copies else self._issued

    def wait(self, event: Event | None) -> None:
        if isinstance(event, _Event):
            with self._turn:
                while self._copies and self._copies[0].number <= event.copies:
                    copy = self._copies.pop(0)
                    copy.out[:] = copy.source

    def record(self, *read: Any, last: bool = False) -> Event | None:
        with self._turn:
            self._kernels += 1
            for memory in read:
                self._reads.append((memory, self._kernels))
                if last:
                    memory[:] = POISON
            return _Event(self, kernels=self._kernels)

    def to_gpu(self, x: Array) -> Array:
        return x.copy()

    def to_host(self, x: Array) -> Array:
        return x.copy()

    def free(self, memory: Any, unpacked: int = 0) -> None:
        super().free(memory, unpacked)
        with self._turn:
            if any(_overlap(copy.out, memory) for copy in self._copies):
                self.faults.append("memory of the GPU was freed while it was copied to")
            self._forget(memory)
            memory[:] = POISON

    def free_host(self, memory: Bytes) -> int:
        with self._turn:
            if any(_overlap(copy.source, memory) for copy in self._copies):
                self.faults.append("RAM was freed while it was copied from")
            memory[:] = POISON
        return super().free_host(memory)

    def _alloc(self, nbytes: int) -> Any:
        memory = aligned_buffer(nbytes)
        memory[:] = POISON
        with self._turn:
            self._forget(memory)
            self._awaited = self._kernels  # as CUDA's: kernels may be reading what was there
        return memory

    def _begin_copy(self, source: Bytes, out: Any, after: Event | None) -> Event | None:
        with self._turn:
            if isinstance(after, _Event):
                self._awaited = max(self._awaited, after.kernels)
            self._reads = [read for read in self._reads if read[1] > self._awaited]
            if any(_overlap(out, memory) for memory, _ in self._reads):
                self.faults.append("a copy does not wait for the kernels that read what was there")
            out[:] = POISON
            self._issued += 1
            self._copies.append(_Copy(self._issued, source, out))
            return _Event(self, copies=self._issued)

    def _forget(self, memory: Bytes) -> None:
        self._copies = [copy for copy in self._copies if not _overlap(copy.out, memory)]
        self._reads = [read for read in self._reads if not _overlap(read[0], memory)]


def _overlap(a: Bytes, b: Bytes) -> bool:
    """Whether two flat arrays share a byte."""
    first, second = a.ctypes.data, b.ctypes.data
    return bool(first < second + b.nbytes and second < first + a.nbytes)
