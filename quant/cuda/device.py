"""Devices that run kernels: a GPU or, in tests, the host's memory with a launcher.

A device works in order, so freed memory can be reused at once.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.memory import GRANULE, Pool
from localrt.quant.cuda.programs import Program

Grid = tuple[int, int, int]
Values = npt.NDArray[Any]


_SCARCE_NBYTES = 128 << 20


class Handle(Protocol):
    """An opaque object of the driver: a stream, an event, a function or a graph."""

    def __int__(self) -> int:
        """Its address."""


class Event(Protocol):
    """A point in a stream's work."""

    @property
    def handle(self) -> Handle:
        """The driver's event."""

    def record(self, stream: Handle | None = None) -> None:
        """Record the event after all work of the stream so far."""

    def synchronize(self) -> None:
        """Wait until it has happened."""

    def query(self) -> bool:
        """Whether it has happened."""

    def ms_until(self, later: Self) -> float:
        """Milliseconds between two timed events that have happened."""


class Launcher(Protocol):
    """Runs kernels."""

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        """Start ``grid`` blocks of ``threads``, with ``args`` as the kernel's one argument."""

    def prepare(self, program: Program) -> None:
        """Compile a program before it is launched, or load it from the disk; from any thread."""


class Device(ABC):
    """Memory, and kernels and copies that run in order.

    A thread's work goes to ``stream``. Memory comes from pools: ``scratch`` for a pass,
    ``persistent`` for weights and caches.
    """

    is_gpu = False
    recording = False
    """Whether this thread is recording a graph."""
    name = "cpu"
    processors = 1
    capability: tuple[int, int] = (0, 0)
    stream: Handle | None = None
    fresh_passes = 0  # see ``Ops``

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.scratch, self.persistent = self.new_pool(), self.new_pool(slab=GRANULE)
        self.thread = threading.local()

    def new_pool(self, **options: int) -> Pool:
        """A pool of the device's memory."""
        return Pool(self.alloc, self.free, lock=self._lock, **options)

    @property
    def pool(self) -> Pool:
        """The scratch pool for work that this thread starts."""
        recording: Pool | None = getattr(self.thread, "pool", None)
        return self.scratch if recording is None else recording

    @property
    def free_nbytes(self) -> int:
        """Bytes that can still be allocated: free on the GPU, or unused in our pools."""
        free, unused = self.memory()[0], self.persistent.unused_nbytes + self.scratch.unused_nbytes
        if free < min(unused, _SCARCE_NBYTES):  # leave the rest to other programs
            self.trim()
            free, unused = (
                self.memory()[0],
                self.persistent.unused_nbytes + self.scratch.unused_nbytes,
            )
        return free + unused

    def trim(self) -> None:
        """Free the pools' unused memory."""
        self.persistent.trim()
        self.scratch.trim()

    def enter(self) -> None:  # noqa: B027  RAM needs nothing
        """Make this device current for the calling thread."""

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the GPU's memory."""
        return 0, 0

    @abstractmethod
    def alloc(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` uninitialized bytes.

        Raises:
            MemoryBudgetError: the GPU has no room for them.
        """

    @abstractmethod
    def free(self, address: int) -> None:
        """Free what ``alloc`` returned."""

    @abstractmethod
    def copy_in(self, to: int, values: Values, stream: Handle | None = None) -> None:
        """Copy contiguous values from the host; pinned ones must not change until the copy has
        ended.
        """

    @abstractmethod
    def stage(self, to: int, values: Values) -> None:
        """Copy values that the caller may change at once, without waiting."""

    @abstractmethod
    def copy_out(self, values: Values, source: int, stream: Handle | None = None) -> None:
        """Copy to contiguous values of the host, without waiting."""

    @abstractmethod
    def fetch(self, values: Values, source: int) -> None:
        """Copy to contiguous values of the host, and wait."""

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy within the device."""

    @abstractmethod
    def clear(self, to: int, nbytes: int) -> None:
        """Write zeros."""

    @abstractmethod
    def event(self, *, timed: bool = False, sleeps: bool = False) -> Event | None:
        """A new event; None for a device whose calls are synchronous. A thread that waits for the
        event spins, unless it ``sleeps``.
        """

    @abstractmethod
    def synchronize(self, stream: Handle | None = None) -> None:
        """Wait for all work of the stream."""

    @abstractmethod
    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Values:
        """Zeroed RAM that the device can read and write; freed with its last reference."""

    @abstractmethod
    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        """See ``Launcher``."""

    @abstractmethod
    def prepare(self, program: Program) -> None:
        """See ``Launcher``."""


class Ram(Device):
    """The host's memory; kernels are run by a launcher given to ``emulate``."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[int, Values] = {}

    def __str__(self) -> str:
        return "cpu"

    def alloc(self, nbytes: int) -> int:
        buffer = np.empty(nbytes + 256, np.uint8)
        address = -(-buffer.ctypes.data // 256) * 256
        self._buffers[address] = buffer
        return address

    def free(self, address: int) -> None:
        del self._buffers[address]

    def copy_in(self, to: int, values: Values, stream: Handle | None = None) -> None:
        ctypes.memmove(to, values.ctypes.data, values.nbytes)

    stage = copy_in

    def copy_out(self, values: Values, source: int, stream: Handle | None = None) -> None:
        ctypes.memmove(values.ctypes.data, source, values.nbytes)

    fetch = copy_out

    def copy(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def clear(self, to: int, nbytes: int) -> None:
        ctypes.memset(to, 0, nbytes)

    def event(self, *, timed: bool = False, sleeps: bool = False) -> None:
        return None

    def synchronize(self, stream: Handle | None = None) -> None:
        pass

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Values:
        return np.zeros(shape, dtype)

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        assert _emulator is not None, "kernels run on a GPU"
        _emulator.launch(program, grid, threads, args)

    def prepare(self, program: Program) -> None:
        assert _emulator is not None, "kernels run on a GPU"
        _emulator.prepare(program)


_emulator: Launcher | None = None


def emulate(launcher: Launcher | None) -> Launcher | None:
    """Have ``launcher`` run kernels on the CPU; returns the previous launcher."""
    global _emulator
    before, _emulator = _emulator, launcher
    return before
