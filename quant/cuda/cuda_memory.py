"""A CUDA GPU's memory and copies for the offloading pipeline, on torch.

One stream copies to the GPU, one to the host, torch's current stream computes; they wait for each
other's events. The host waits only for copies whose source it will change, and for results it
needs. On ``device="cpu"`` the same calls copy in RAM, for tests without a GPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.cuda.launch import FullGpu, upload
from localrt.quant.cuda.routing import CudaRouting
from localrt.quant.cuda.stream import Stream
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.experts import Routing

_PAGE = 4096
_SAMPLE = 256 << 20


class CudaCopies:
    """Copies to ``device``. Only ``copy_in`` may be called by several threads. At most
    ``most_pinned`` bytes of RAM are pinned.
    """

    def __init__(self, device: str = "cuda", *, most_pinned: int | None = None) -> None:
        self._device = torch.device(device)
        self._real = self._device.type == "cuda"
        self.name = torch.cuda.get_device_name(self._device) if self._real else "cpu"
        cuda: Any = torch.cuda  # not typed throughout
        self._cuda = cuda
        self._stream = cuda.Stream(self._device) if self._real else None
        self._back = cuda.Stream(self._device) if self._real else None
        self._lock = threading.Lock()
        self._pinned: dict[int, Bytes] = {}  # by address
        self._may_pin = most_pinned
        self.unpinned = 0  # bytes of buffers that could not be pinned

    @property
    def total_nbytes(self) -> int:
        """The GPU's memory."""
        return int(self._cuda.mem_get_info(self._device)[1]) if self._real else 0

    def keep_free(self, nbytes: int) -> None:
        """Have torch refuse to take the last ``nbytes`` of what is free now."""
        free, total = self._cuda.mem_get_info(self._device)
        most = max(0, self._cuda.memory_reserved(self._device) + free - nbytes)
        self._cuda.set_per_process_memory_fraction(min(1.0, most / total), self._device)

    def alloc(self, nbytes: int) -> Tensor:
        """Uninitialized bytes on the GPU.

        Raises:
            MemoryBudgetError: not enough memory is free.
        """
        with FullGpu():
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._stream is not None:
            # Running kernels may still read the old contents of these bytes.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def free(self, memory: Tensor) -> None:
        """Free the memory even if the tensor is still referenced: it is empty afterwards."""
        if self._stream is not None:
            self._stream.synchronize()  # what is still being copied there
            memory.untyped_storage().resize_(0)
            torch.cuda.empty_cache()  # torch would keep it, and other programs would not see it
            return
        with contextlib.suppress(RuntimeError):  # what numpy has seen of RAM cannot be resized
            memory.untyped_storage().resize_(0)

    def host_buffer(self, nbytes: int) -> Bytes:
        """Pinned RAM, page-aligned: exactly ``nbytes``, where torch's own pool would round up.

        If the system refuses pinning it is plain RAM, from which copies are slower.
        """
        from localrt.quant.ops.arrays import aligned_buffer

        data = aligned_buffer(nbytes)
        if self._real and nbytes:
            if self._pin(data):
                self._pinned[data.ctypes.data] = data
            else:
                self.unpinned += nbytes
        return data

    def _pin(self, data: Bytes) -> bool:
        if self._may_pin is not None and data.nbytes > self._may_pin:
            return False
        with self._cuda.device(self._device):  # otherwise the first GPU gets a context too
            status = self._cuda.cudart().cudaHostRegister(data.ctypes.data, data.nbytes, 0)
        if int(status) != 0:
            # CUDA remembers the error, and torch would raise it at the next kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            return False
        if self._may_pin is not None:
            self._may_pin -= data.nbytes
        return True

    def copy_in(self, source: Bytes, out: Tensor, after: Any, *, wait: bool = True) -> Any:
        """Copy ``source`` to ``out`` once ``after`` has happened; returns when the copy is done.

        Kernels may wait for the returned event. Without ``wait`` it also says when ``source`` may
        be changed.
        """
        tensor = torch.from_numpy(source)
        if self._stream is None:
            out.copy_(tensor)
            return None
        with self._lock, torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            out.copy_(tensor, non_blocking=True)
            event = self._cuda.Event(blocking=True)
            event.record(self._stream)
        if wait:
            event.synchronize()
        return event

    def settled(self, event: Any) -> None:
        """Return when ``event`` has happened."""
        if self._real and event is not None:
            event.synchronize()

    def ended(self, event: Any) -> bool:
        """Whether ``event`` has happened."""
        return not self._real or event is None or bool(event.query())

    def wait(self, event: Any) -> None:
        """Kernels started from now on wait for ``event``."""
        if self._real and event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def record(self) -> Any:
        """An event after all kernels started so far."""
        if not self._real:
            return None
        event = self._cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def to_gpu(self, x: npt.NDArray[np.float32]) -> Stream:
        """Activations (R, D) of the CPU as the GPU's residual stream."""
        return Stream(upload(np.asarray(x, np.float32), self._device))

    def to_host(self, x: Stream | Tensor) -> npt.NDArray[np.float32]:
        """The GPU's residual stream, or normed rows, as the CPU's activations (R, D)."""
        device = self._cuda.device(self._device) if self._real else contextlib.nullcontext()
        with torch.inference_mode(), device:
            there = x if isinstance(x, Tensor) else x.settle()
            values: npt.NDArray[np.float32] = there.float().cpu().numpy()
        return values if self._real else values.copy()

    def send(self, x: Tensor, routing: Routing) -> Callable[[], npt.NDArray[np.float32]]:
        """Begin to copy normed rows and the results of ``routing`` to pinned RAM.

        The returned function waits for both and gives the rows as the CPU's activations (R, D). For
        as long as it may be called they must stay: their memory would be used again.
        """
        if self._back is None:
            return lambda: self.to_host(x)
        event = self._cuda.Event()
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(), torch.cuda.stream(self._back):
            rows = self._pinned_copy(x)
            if isinstance(routing, CudaRouting):
                routing.copy_to(self._pinned_copy(routing.results), event)
            event.record(self._back)

        def received() -> npt.NDArray[np.float32]:
            event.synchronize()
            with torch.inference_mode():
                values: npt.NDArray[np.float32] = rows.float().numpy()
            return values

        return received

    def _pinned_copy(self, there: Tensor) -> Tensor:
        """A pinned copy in RAM, made when the current stream reaches it."""
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        here.copy_(there, non_blocking=True)
        return here

    def measure(self) -> tuple[float, float]:
        """Bytes per second from pinned RAM to the GPU, and of reading the GPU's own memory.

        Medians of five; takes a fraction of a second and 512 MB of each.
        """
        source = self.host_buffer(_SAMPLE)
        source[::_PAGE] = 1
        out, other = self.alloc(_SAMPLE), self.alloc(_SAMPLE)
        link, memory = [], []
        for _ in range(6):
            started = time.perf_counter()
            self.copy_in(source, out, None)
            link.append(time.perf_counter() - started)
            started = time.perf_counter()
            other.copy_(out)
            if self._real:
                torch.cuda.current_stream(self._device).synchronize()
            memory.append(time.perf_counter() - started)
        self.free_host(source)
        self.free(out)
        self.free(other)
        return _SAMPLE / float(np.median(link[1:])), 2 * _SAMPLE / float(np.median(memory[1:]))

    def close(self) -> None:
        """Unpin the RAM, and give torch's cached memory back to the GPU."""
        for data in list(self._pinned.values()):
            self.free_host(data)
        if self._real:
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def free_host(self, data: Bytes) -> None:
        """Unpin a buffer of ``host_buffer``; it is freed with its last reference."""
        if self._pinned.pop(data.ctypes.data, None) is not None:
            if self._stream is not None:
                self._stream.synchronize()  # what is still being copied from there
            with self._cuda.device(self._device):
                self._cuda.cudart().cudaHostUnregister(data.ctypes.data)
            if self._may_pin is not None:
                self._may_pin += data.nbytes
