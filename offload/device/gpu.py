"""A GPU as the pipeline sees it: memory of a fixed size, copies, kernels, and events between them.

An event is a point in a GPU's work that copies, kernels or the host can wait for. ``cuda.py``
implements a GPU with CUDA. Also here: slabs (single allocations for several units, freed as a
whole), and the clock, which sums the busy times of SSD, link, CPU and GPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

from localrt.common.errors import MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.models.weight_store import PassTask, Resource
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array, DeviceMemory, Hidden, Memory, aligned_buffer
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Ops

_MOST_TASKS = 200_000  # tasks remembered at most; a long run has millions


class Clock:
    """Times tasks. Thread-safe.

    After ``keep(n)`` the latest n tasks are remembered, with times in seconds; before, none.
    """

    def __init__(self, keep: int = 0) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[PassTask] = deque(maxlen=min(keep, _MOST_TASKS))
        self._busy: dict[str, float] = {}
        self._active: dict[str, tuple[int, float]] = {}  # running tasks, busy since

    def begin(self, resource: Resource) -> float:
        """Begin a task; pass the returned value to ``end``."""
        with self._lock:
            now = time.perf_counter()
            count, began = self._active.get(resource, (0, now))
            self._active[resource] = (count + 1, began if count else now)
            return now

    def end(self, resource: Resource, name: str, started: float) -> None:
        """End the task."""
        with self._lock:
            now = time.perf_counter()
            count, began = self._active[resource]
            self._active[resource] = (count - 1, began)
            if count == 1:
                self._busy[resource] = self._busy.get(resource, 0.0) + now - began
            if self._tasks.maxlen:
                self._tasks.append(PassTask(resource, name, max(started, began), now))

    def span(
        self, resource: Resource, name: str, start: float, seconds: float, times: int = 1
    ) -> None:
        """Count a task timed elsewhere ``times`` times; the resource has no other meanwhile."""
        with self._lock:
            self._busy[resource] = self._busy.get(resource, 0.0) + times * seconds
            if self._tasks.maxlen:
                self._tasks.append(PassTask(resource, name, start, start + seconds))

    @contextmanager
    def task(self, resource: Resource, name: str) -> Iterator[None]:
        """A context that times a task."""
        started = self.begin(resource)
        try:
            yield
        finally:
            self.end(resource, name, started)

    @contextmanager
    def pause(self, resource: Resource, name: str) -> Iterator[None]:
        """A context in which a resource's only task waits, not busy; it then counts as two."""
        self.end(resource, name, 0.0)
        try:
            yield
        finally:
            self.begin(resource)

    def busy(self) -> dict[str, float]:
        """Seconds in which each resource has had at least one task, up to now."""
        with self._lock:
            busy, now = dict(self._busy), time.perf_counter()
            for resource, (count, began) in self._active.items():
                if count:
                    busy[resource] = busy.get(resource, 0.0) + now - began
            return busy

    @property
    def keeps(self) -> bool:
        """Whether tasks are remembered."""
        return bool(self._tasks.maxlen)

    def keep(self, count: int) -> None:
        """Remember the latest ``count`` tasks from now on."""
        with self._lock:
            self._tasks = deque(self._tasks, maxlen=min(count, _MOST_TASKS))

    def tasks(self) -> list[PassTask]:
        """The remembered tasks, oldest first."""
        with self._lock:
            return list(self._tasks)


SLABS = 64
"""The approximate number of slabs of one kind. An eviction frees at most one slab too much; on an 8
GB GPU about 64 MB are lost to rounding.
"""


class Event(Protocol):
    """A point in a GPU's work; None stands for one that has passed."""

    def query(self) -> bool:
        """Whether the work up to it has ended, without waiting."""

    def synchronize(self) -> None:
        """Wait until it has ended."""


Activations = TypeVar("Activations", Hidden, Array)


class Gpu:
    """One GPU; ``ops`` computes on its memory. Used by one thread at a time, except for copies to
    it.

    ``capacity`` is the most bytes that may be used, ``used`` those allocated here, ``reserved``
    those of caches and kernels' scratch. ``peak`` is the largest sum of both so far. ``link_bytes``
    counts bytes copied to it.
    """

    def __init__(self, clock: Clock, ops: Ops, *, name: str, capacity: int) -> None:
        self.name, self.ops, self.capacity = name, ops, capacity
        self.used = self.reserved = self.peak = 0
        self.link_bytes = 0
        self._times = False  # whether its work is timed by events
        self._clock = clock
        self._lock = threading.Lock()

    def alloc(self, nbytes: int, unpacked: int = 0) -> DeviceMemory:
        """Uninitialized GPU memory, to be sliced by bytes. ``unpacked`` more bytes are counted for
        weights that ``Ops`` unpack from it.

        Raises:
            MemoryBudgetError: it would exceed the capacity.
        """
        needed = nbytes + unpacked
        with self._lock:
            if self.used + needed > self.capacity:
                raise MemoryBudgetError(
                    f"{self.name}: {format_bytes(needed)} more do not fit the "
                    f"{format_bytes(self.capacity)} that may be used, of which "
                    f"{format_bytes(self.used)} are taken"
                )
            self.used += needed
        try:
            memory = self._alloc(nbytes)
        except BaseException:
            with self._lock:
                self.used -= needed
            raise
        self.set_reserved(self.reserved)
        return memory

    def set_reserved(self, nbytes: int) -> None:
        """Count ``nbytes`` for caches and scratch from now on."""
        with self._lock:
            self.reserved = nbytes
            self.peak = max(self.peak, self.used + nbytes)

    def free(self, memory: Memory, unpacked: int = 0) -> None:
        """Free memory, and what ``Ops`` unpacked from it."""
        with self._lock:
            self.used -= memory.nbytes + unpacked

    def _alloc(self, nbytes: int) -> DeviceMemory:
        raise NotImplementedError

    def host_buffer(self, nbytes: int) -> Bytes:
        """Pinned, page-aligned RAM for fast copies."""
        return aligned_buffer(nbytes)

    @property
    def unpinned(self) -> int:
        """Bytes of host buffers that could not be pinned: copies from them are slower."""
        return 0

    def free_host(self, memory: Bytes) -> int:
        """Free a host buffer; returns its bytes."""
        return memory.nbytes

    def copy_in(self, name: str, source: Bytes, out: Memory, after: Event | None) -> None:
        """Copy to the GPU once ``after`` has happened; returns when the copy has ended."""
        copied = self.begin_copy(name, source, out, after)
        if copied is not None:
            copied.synchronize()

    def begin_copy(
        self, name: str, source: Bytes, out: Memory, after: Event | None
    ) -> Event | None:
        """Begin to copy; ``source`` must not change until the returned event has happened."""
        self.queue_copy(name, source, out, after)
        return self.end_copy(name)

    def queue_copy(self, name: str, source: Bytes, out: Memory, after: Event | None) -> None:
        """Queue the copy of a piece of a unit, to run after earlier copies and ``after``."""
        with self._lock:
            self.link_bytes += source.nbytes
        with nullcontext() if self._times else self._clock.task("link", name):
            self._queue_copy(source, out, after)

    def end_copy(self, name: str) -> Event | None:
        """An event after all pieces queued since the last call."""
        return None

    def settle_copies(self) -> None:
        """Wait for all queued copies."""

    def task(self, name: str) -> AbstractContextManager[None]:
        """A context that times the kernels started in it."""
        return self._clock.task("gpu", name)

    def begin_pass(self, rows: int) -> None:
        """A pass of ``rows`` begins: later work belongs to it."""

    def count_times(self) -> None:
        """Report finished GPU work to the clock."""

    def _queue_copy(self, source: Bytes, out: Memory, after: Event | None) -> None:
        raise NotImplementedError

    def wait(self, event: Event | None) -> None:
        """Make kernels started from now on wait for ``event``."""

    def record(self) -> Event | None:
        """An event after all kernels started so far: their inputs may then be overwritten."""
        return None

    def to_gpu(self, x: Activations) -> Activations:
        """Copy activations of the CPU's ``Ops`` to the GPU's."""
        raise NotImplementedError

    def to_host(self, x: Activations) -> Activations:
        """Copy the GPU's activations to the CPU's."""
        raise NotImplementedError

    def send(self, x: Array, routing: Routing) -> Callable[[], Array]:
        """Begin to copy a layer's rows and their chosen experts to the host.

        The returned function waits for both and returns the rows as the CPU's activations. Kernels
        started later do not delay the copies.
        """
        return lambda: self.to_host(x)

    def close(self) -> None:
        """Free all memory that no caller holds."""


class Slab:
    """One allocation of ``nbytes`` on ``gpu`` for ``units`` consecutive units.

    Raises:
        MemoryBudgetError: the GPU has no room for it.
    """

    def __init__(self, gpu: Gpu, nbytes: int, units: int) -> None:
        self.nbytes = nbytes
        self._gpu = gpu
        self._memory: DeviceMemory | None = gpu.alloc(nbytes)
        self._next, self._units_left = 0, units

    def take(self, nbytes: int) -> DeviceMemory:
        """The next unit's memory."""
        self._next += nbytes
        assert self._next <= self.nbytes, "it has room for all its units"
        assert self._memory is not None, "it is not free"
        return self._memory[self._next - nbytes : self._next]

    def release(self) -> int:
        """Release one unit; returns the bytes freed: all with the last unit, else 0."""
        self._units_left -= 1
        return self.free() if self._units_left == 0 else 0

    def free(self) -> int:
        """Free the memory even if in use; returns the bytes, or 0 if it was already free."""
        memory, self._memory = self._memory, None
        if memory is None:
            return 0
        self._gpu.free(memory)
        return self.nbytes


def share_slabs(sizes: Mapping[str, int]) -> list[list[str]]:
    """Group units, whose ``sizes`` are in the order of a pass, into at most ``SLABS`` slabs of
    about equal bytes.

    A group's units are spread over the pass, so that after an eviction each can be copied while
    units before it are computed.
    """
    target = -(-sum(sizes.values()) // SLABS)
    alone = [[name] for name, size in sizes.items() if size >= target]
    small = [name for name, size in sizes.items() if size < target]
    count = -(-sum(sizes[name] for name in small) // target) if small else 0
    groups: list[list[str]] = [small[first::count] for first in range(count)]
    return [*alone, *groups]
