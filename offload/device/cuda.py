"""A CUDA GPU, and the copies to it.

Copies go through one stream of their own from pinned RAM, kernels through another; each waits for
the events that it needs, and nothing waits for the whole device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from localrt.offload.device.gpu import Clock, Event, Gpu
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Ops


class CudaGpu(Gpu):
    """``capacity`` limits allocations to less than the GPU's own memory."""

    def __init__(self, clock: Clock, ops: Ops, copies: CudaCopies, *, capacity: int) -> None:
        super().__init__(clock, ops, name=copies.name, capacity=capacity)
        self._copies = copies
        self._copied: deque[tuple[str, Any, Any]] = deque()  # with events before and after
        self._origin: tuple[Any, float] | None = None  # an event, and when it has happened
        self._times_copies = copies.is_gpu

    def free(self, memory: Any, unpacked: int = 0) -> None:
        """Give memory back to the GPU at once."""
        super().free(memory, unpacked)
        self._copies.free(memory)

    def host_buffer(self, nbytes: int) -> Bytes:
        """Pinned RAM where the system allows it."""
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
        began, ended = self._copies.end_copy()
        if self._times_copies:
            self._copied.append((name, began, ended))
        event: Event | None = ended
        return event

    def settle_copies(self) -> None:
        """Wait for the stream that copies."""
        self._copies.settle()
        self.count_times()

    def count_times(self) -> None:
        """Tell the clock of the copies that have ended."""
        while self._copied and self._copied[0][2].query():
            name, began, ended = self._copied.popleft()
            seconds = began.ms_until(ended) / 1e3
            now = time.perf_counter()
            since, at = self._origin or (ended, now)
            at = min(now, at + since.ms_until(ended) / 1e3)
            self._origin = ended, at
            self._clock.span("link", name, at - seconds, seconds)

    def wait(self, event: Event | None) -> None:
        """Have the current stream wait."""
        self._copies.wait(event)

    def record(self) -> Event | None:
        """An event of the current stream."""
        event: Event | None = self._copies.record()
        return event

    def to_gpu(self, x: Array) -> Array:
        """Copy float32 rows to the GPU as a residual stream."""
        return self._copies.to_gpu(x)

    def to_host(self, x: Array) -> Array:
        """Copy the rows to the host; waits for the stream."""
        return self._copies.to_host(x)

    def send(self, x: Array, routing: Routing) -> Callable[[], Array]:
        """Copy to pinned RAM through a separate stream."""
        return self._copies.send(x, routing)

    def close(self) -> None:
        """Give the cached memory back to the GPU."""
        self._copies.close()

    def _alloc(self, nbytes: int) -> Any:
        return self._copies.alloc(nbytes)

    def _queue_copy(self, source: Bytes, out: Any, after: Event | None) -> None:
        self._copies.queue(source, out, after)
