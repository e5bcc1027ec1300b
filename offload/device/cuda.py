"""A CUDA GPU, and the copies to it.

Copies from pinned RAM have their own stream, kernels another; each waits only for the events that
it needs, and nothing waits for the whole device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from localrt.models.weight_store import Resource
from localrt.offload.device.gpu import Activations, Clock, Event, Gpu
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.device import Event as CudaEvent
from localrt.quant.cuda.products import MOST_ROWS
from localrt.quant.cuda.tensor import Tensor
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.ops.arrays import Array, DeviceMemory, Memory
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Ops

_TIMED = 8
"""One in this many short passes is timed and counts for all, since events cost host time."""


class CudaGpu(Gpu):
    """``capacity`` limits allocations to less than the GPU's own memory."""

    def __init__(self, clock: Clock, ops: Ops, copies: CudaCopies, *, capacity: int) -> None:
        super().__init__(clock, ops, name=copies.name, capacity=capacity)
        self._copies = copies
        self._times = copies.is_gpu
        self._copied, self._computed = _Spans("link", clock), _Spans("gpu", clock)
        self._in_task = False
        self._short = 0  # short passes so far
        self._weight = 1  # how many passes the current one counts for; 0: not timed
        self._copy_weight = 1  # the same for the copy being queued

    def free(self, memory: Memory, unpacked: int = 0) -> None:
        """Free the memory at once."""
        super().free(memory, unpacked)
        self._copies.free(cast(Tensor, memory))

    def host_buffer(self, nbytes: int) -> Bytes:
        """RAM, pinned if the system allows it."""
        return self._copies.host_buffer(nbytes)

    @property
    def unpinned(self) -> int:
        """Bytes that the system did not allow to pin."""
        return self._copies.unpinned

    def free_host(self, memory: Bytes) -> int:
        """Unpin the RAM; returns its bytes."""
        self._copies.free_host(memory)
        return memory.nbytes

    def end_copy(self, name: str) -> Event | None:
        """A timed event."""
        copied = self._copies.end_copy(timed=bool(self._weight))
        times, self._copy_weight = self._copy_weight, self._weight
        began, ended = copied[-1]
        if self._times and began is not None:
            self._copied.add(name, cast("list[_Timed]", copied), times)
        event: Event | None = ended
        return event

    def settle_copies(self) -> None:
        """Wait for the copy stream."""
        self._copies.settle()
        self.count_times()

    def begin_pass(self, rows: int) -> None:
        """Decide whether the pass is timed."""
        if rows > MOST_ROWS or self._clock.keeps:
            self._weight = 1
            return
        first, due = not self._short, self._short % _TIMED == 0
        self._weight = 0 if not due else 1 if first else _TIMED
        self._short += 1

    def count_times(self) -> None:
        """Report finished copies and tasks to the clock."""
        self._copied.count()
        self._computed.count()

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """Time a task; one within another is not timed by itself."""
        if not self._times:
            with super().task(name):
                yield
            return
        if self._in_task or not self._weight:
            yield
            return
        began, self._in_task = self._copies.record(timed=True), True
        try:
            yield
        finally:
            self._in_task = False
        spans = [(began, self._copies.record(timed=True))]
        self._computed.add(name, cast("list[_Timed]", spans), self._weight)

    def wait(self, event: Event | None) -> None:
        """Make the current stream wait."""
        self._copies.wait(cast("CudaEvent | None", event))

    def record(self) -> Event | None:
        """An event of the current stream."""
        event: Event | None = self._copies.record()
        return event

    def to_gpu(self, x: Activations) -> Activations:
        """Copy float32 rows to the GPU as a residual stream."""
        return cast(Activations, self._copies.to_gpu(cast(Floats, x)))

    def to_host(self, x: Activations) -> Activations:
        """Copy the rows to the host; waits for the stream."""
        return cast(Activations, self._copies.to_host(cast(Any, x)))

    def send(self, x: Array, routing: Routing) -> Callable[[], Array]:
        """Copy to pinned RAM through a separate stream."""
        return cast(Callable[[], Array], self._copies.send(cast(Any, x), routing))

    def close(self) -> None:
        """Free the cached memory."""
        self._copies.close()

    def _alloc(self, nbytes: int) -> DeviceMemory:
        return self._copies.alloc(nbytes)

    def _queue_copy(self, source: Bytes, out: Memory, after: Event | None) -> None:
        self._copies.queue(source, cast(Tensor, out), cast("CudaEvent | None", after))


_Timed = tuple[CudaEvent, CudaEvent]
"""The events before and after some work."""


class _Spans:
    """Tasks of one stream, timed by pairs of events and reported to the clock when they end."""

    def __init__(self, resource: Resource, clock: Clock) -> None:
        self._resource, self._clock = resource, clock
        self._open: deque[tuple[str, list[_Timed], int]] = deque()
        self._last: tuple[CudaEvent, float] | None = None  # an event, and its time
        self._counting = threading.Lock()

    def add(self, name: str, spans: list[_Timed], times: int) -> None:
        self._open.append((name, spans, times))

    def count(self) -> None:
        """Report finished tasks to the clock; may be called from any thread."""
        with self._counting:
            while self._open and self._open[0][1][-1][1].query():
                name, spans, times = self._open.popleft()
                now, ended = time.perf_counter(), spans[-1][1]
                seconds = sum(began.ms_until(end) for began, end in spans) / 1e3
                last, at = self._last or (ended, now)
                at = min(now, at + last.ms_until(ended) / 1e3)
                self._last = ended, at
                self._clock.span(self._resource, name, at - seconds, seconds, times)
