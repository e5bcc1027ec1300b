"""A CUDA GPU's memory and copies for the offloading pipeline.

One stream copies to the GPU, one to the host, and the GPU's main stream computes; they wait for
each other's events. The host waits only for copies whose source it will change, and for results. On
``device="cpu"`` the same calls copy in RAM, for tests without a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.common.files import PAGE
from localrt.quant.cuda.device import Event
from localrt.quant.cuda.driver import array_of, device_of
from localrt.quant.cuda.memory import Pool, PoolBlock
from localrt.quant.cuda.routing import CudaRouting
from localrt.quant.cuda.stream import Stream
from localrt.quant.cuda.tensor import BFLOAT16, UINT8, Tensor, upload
from localrt.quant.formats.convert import bf16_values
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.experts import Routing

_SAMPLE = 256 << 20
_RETURNED = 1 << 20  # bytes pinned at the start for results

Span = tuple[Event | None, Event | None]
"""Events before and after some work."""


class CudaCopies:
    """Memory of ``device``, and copies. Only copies to it may be started by several threads. At
    most ``most_pinned`` bytes of RAM are pinned.
    """

    def __init__(self, device: str = "cuda", *, most_pinned: int | None = None) -> None:
        self._device: Any = device_of(device)
        self.is_gpu = self._device.is_gpu
        self.name = self._device.name
        self._stream, self._back = (
            self._device.new_stream(self) if self.is_gpu else None for _ in range(2)
        )
        self._lock = threading.Lock()
        self._pinned: dict[int, Bytes] = {}  # by address
        self._may_pin = most_pinned
        self.unpinned = 0  # bytes of buffers that could not be pinned
        self._copying: Event | None = None  # an event at the beginning of running copies
        self._copied: list[Span] = []  # events around earlier copies of the same unit
        self._timed = True
        if self.is_gpu:  # memory is reused in stream order
            self._returned = Pool(self._device.alloc_host, self._device.free_host, slab=_RETURNED)

    @property
    def total_nbytes(self) -> int:
        """The GPU's memory."""
        return int(self._device.memory()[1]) if self.is_gpu else 0

    def keep_free(self, nbytes: int) -> None:
        """Leave ``nbytes`` of the currently free memory to other programs."""
        free, _ = self._device.memory()
        self._device.most_nbytes = max(0, self._device.allocated_nbytes + free - nbytes)

    def alloc(self, nbytes: int) -> Tensor:
        """Uninitialized bytes on the GPU, an allocation of their own; see ``free``.

        Raises:
            MemoryBudgetError: not enough memory is free.
        """
        device = self._device
        block = PoolBlock(device.alloc(max(1, nbytes)), nbytes, device.free)
        return Tensor(device, block, block.address, (nbytes,), (1,), UINT8)

    def free(self, memory: Tensor) -> None:
        """Free the memory of a tensor, even if it is still referenced."""
        if self.is_gpu:
            self._device.synchronize(self._stream)  # copies to it may be running
        assert memory.block is not None, "it is what was allocated"
        memory.block.free()

    def host_buffer(self, nbytes: int) -> Bytes:
        """Pinned RAM, page-aligned.

        If the system refuses pinning it is plain RAM, from which copies are slower.
        """
        data = aligned_buffer(nbytes)
        if self.is_gpu and nbytes:
            if self._pin(data):
                self._pinned[data.ctypes.data] = data
            else:
                self.unpinned += nbytes
        return data

    def _pin(self, data: Bytes) -> bool:
        if self._may_pin is not None and data.nbytes > self._may_pin:
            return False
        if not self._device.register(data):
            return False
        if self._may_pin is not None:
            self._may_pin -= data.nbytes
        return True

    def copy_in(
        self, source: Bytes, out: Tensor, after: Event | None, *, wait: bool = True
    ) -> Event | None:
        """Copy ``source`` to ``out`` once ``after`` has happened; returns when the copy is done.

        Kernels may wait for the returned event. Without ``wait``, ``source`` must not change until
        then.
        """
        self.queue(source, out, after)
        _, event = self.end_copy()[-1]
        if wait and event is not None:
            event.synchronize()
        return event

    def queue(self, source: Bytes, out: Tensor, after: Event | None) -> None:
        """Copy ``source``, which must not change, to ``out`` once ``after`` has happened."""
        assert out.nbytes == source.nbytes, "all of it is written"
        if not self.is_gpu:
            self._device.copy_in(out.address, source)
            return
        with self._lock:
            if after is not None:
                if self._copying is not None:  # time spent waiting is not counted as copying
                    self._copied.append((self._copying, self._stamp()))
                    self._copying = None
                self._device.wait(self._stream, after)
            if self._copying is None and self._timed:
                self._copying = self._stamp()
            self._device.copy_in(out.address, source, self._stream)

    def end_copy(self, *, timed: bool = True) -> list[Span]:
        """Return pairs of events around the copies queued since the last call; waits between copies
        are excluded. The last event is after all copies. From now on, events before copies are
        recorded only if ``timed``.
        """
        if not self.is_gpu:
            return [(None, None)]
        with self._lock:
            ended = self._stamp()
            copied, self._copied = self._copied, []
            began = self._copying or ended if self._timed else None
            self._copying, self._timed = None, timed
            return [*copied, (began, ended)]

    def _stamp(self) -> Event:
        event: Event = self._device.event(timed=True, sleeps=True)
        event.record(self._stream)
        return event

    def settle(self) -> None:
        """Wait for all queued copies."""
        if self.is_gpu:
            self._device.synchronize(self._stream)

    def ended(self, event: Event | None) -> bool:
        """Whether ``event`` has happened."""
        return event is None or bool(event.query())

    def wait(self, event: Event | None) -> None:
        """Kernels started from now on wait for ``event``."""
        if event is not None:
            self._device.wait(self._device.stream, event)

    def record(self, *, timed: bool = False) -> Event | None:
        """An event after all kernels started so far."""
        event: Event | None = self._device.event(timed=timed)
        if event is not None:
            event.record()
        return event

    def to_gpu(self, x: npt.NDArray[np.float32]) -> Stream:
        """Activations (R, D) of the CPU as the GPU's residual stream."""
        return Stream(upload(np.asarray(x, np.float32), self._device))

    def to_host(self, x: Stream | Tensor) -> npt.NDArray[np.float32]:
        """The GPU's residual stream, or normed rows, as the CPU's activations (R, D)."""
        return (x if isinstance(x, Tensor) else x.settle()).to_host()

    def send(self, x: Tensor, routing: Routing) -> Callable[[], npt.NDArray[np.float32]]:
        """Begin to copy normed rows and the results of ``routing`` to pinned RAM.

        The returned function waits for both and gives the rows as the CPU's activations (R, D).
        Keep a reference to the rows until it has been called: otherwise their memory is reused.
        """
        if not self.is_gpu:
            return lambda: self.to_host(x)
        event, made = self._device.event(), self.record()
        self._device.wait(self._back, made)
        rows = self._begin_copy(x)
        if isinstance(routing, CudaRouting):
            routing.copy_to(self._begin_copy(routing.results), event)
        event.record(self._back)

        def received() -> npt.NDArray[np.float32]:
            event.synchronize()
            return bf16_values(rows) if x.dtype is BFLOAT16 else rows

        return received

    def _begin_copy(self, there: Tensor) -> npt.NDArray[Any]:
        """Begin to copy to pinned RAM, after earlier work of the stream."""
        assert there.is_contiguous, "it is one copy"
        nbytes = max(1, there.nbytes)
        here = array_of(self._returned.take(nbytes), there.shape, there.dtype.numpy)
        self._device.copy_out(here, there.address, self._back)
        return here

    def measure(self, nbytes: int = _SAMPLE) -> tuple[float, float]:
        """Bytes per second from pinned RAM to the GPU, and of reading the GPU's own memory.

        Medians of five copies of ``nbytes``; takes a fraction of a second and twice ``nbytes`` of
        each.
        """
        source = self.host_buffer(nbytes)
        source[::PAGE] = 1
        out, other = self.alloc(nbytes), self.alloc(nbytes)
        link, memory = [], []
        for _ in range(6):
            started = time.perf_counter()
            self.copy_in(source, out, None)
            link.append(time.perf_counter() - started)
            started = time.perf_counter()
            other.put(out)
            self._device.synchronize()
            memory.append(time.perf_counter() - started)
        self.free_host(source)
        self.free(out)
        self.free(other)
        return nbytes / float(np.median(link[1:])), 2 * nbytes / float(np.median(memory[1:]))

    def close(self) -> None:
        """Unpin the RAM, and free unused memory of the GPU."""
        for data in list(self._pinned.values()):
            self.free_host(data)
        if self.is_gpu:
            self._device.synchronize(self._back)
            self._returned.trim()
        self._device.trim()

    def free_host(self, data: Bytes) -> None:
        """Unpin a buffer of ``host_buffer``; it is freed with its last reference."""
        if self._pinned.pop(data.ctypes.data, None) is not None:
            self._device.synchronize(self._stream)  # copies from it may be running
            self._device.unregister(data)
            if self._may_pin is not None:
                self._may_pin += data.nbytes
