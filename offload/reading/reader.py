"""Prefetching: threads that fetch units, piece by piece, and passes that wait for them.

``Reader`` has the common part: loads and their pieces, errors, stalled disks, ending threads. Two
subclasses choose the next piece: ``UnitReader`` follows a fixed order through a ring;
``DemandReader`` reads experts on request, urgent ones first, then expected ones.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from localrt.common.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Event
from localrt.offload.ring import Lease, Ring, UnitChunk, chunks
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.protocol import Check

POLL_S = 0.05
"""Seconds until a waiting pass notices that it was cancelled."""
_CLOSE_S = 2.0  # how long closing waits for running reads
T = TypeVar("T")


class UnitSource(Protocol):
    """The source of a reader's units. Used by several threads at once."""

    def fetch(self, unit: StoredUnit, start: int, out: Bytes, after: Event | None) -> None:
        """Fill ``out`` with the unit's bytes from ``start`` on, not before ``after`` has happened.

        Raises:
            LocalrtError: the bytes cannot be fetched.
        """


@runtime_checkable
class Waiter(Protocol):
    """A check that is told when its pass waits for weights, so that others may use the CPU."""

    def __call__(self) -> None:
        """Raises to abandon the pass."""

    def waiting(self) -> AbstractContextManager[None]:
        """A context for the time that a pass waits."""


def waiting(check: Check | None) -> AbstractContextManager[None]:
    """The context to hold while waiting, for either kind of check."""
    return check.waiting() if isinstance(check, Waiter) else nullcontext()


def require_answer(since: float, stall_s: float, what: str) -> None:
    """Raise CheckpointError if nothing has arrived for ``stall_s`` seconds after ``since``."""
    silent = time.perf_counter() - since
    if silent > stall_s:
        raise CheckpointError(
            f"the disk has not answered for {silent:.0f} seconds (reading {what}): check the drive "
            "that the model is on"
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Load:
    """A unit on its way into ``memory``.

    ``waiting`` holds the pieces not begun yet, ``missing`` counts the bytes not arrived yet,
    ``unread`` those not read yet: the last piece arrives once the unit is verified.
    """

    unit: StoredUnit
    memory: Bytes
    waiting: deque[UnitChunk]
    missing: int = field(init=False)
    unread: int = field(init=False)
    in_flight: int = 0
    error: LocalrtError | None = None

    def __post_init__(self) -> None:
        self.missing = self.unread = self.unit.nbytes

    @property
    def done(self) -> bool:
        """Whether it has arrived whole, or has failed and no piece of it is in flight."""
        return self.missing == 0 or (self.error is not None and not self.in_flight)


Job = tuple[Load, UnitChunk, "Event | None"]
"""A piece to fetch, not before the event has happened."""


class Reader:
    """``threads`` threads fetch from ``source``. ``stall_s``: seconds a disk may stall.

    They call ``verify``, if any, with each unit that they have read; the load fails with its
    errors.

    Private methods except ``_run`` and ``_fetch`` are called with the lock held.
    """

    def __init__(
        self,
        source: UnitSource,
        *,
        threads: int,
        stall_s: float,
        name: str,
        verify: Callable[[StoredUnit, Bytes], None] | None = None,
    ) -> None:
        self._source = source
        self._verify = verify
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._closed = False
        self._fetched = 0
        self._last_arrival = 0.0
        self._threads = [
            threading.Thread(target=self._run, name=f"localrt-{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def bytes_read(self) -> int:
        """Bytes fetched since construction, including dropped ones."""
        with self._changed:
            return self._fetched

    def close(self) -> None:
        """End the threads. A hanging read is not waited for; its thread ends when the read does."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.perf_counter() + _CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, end - time.perf_counter()))

    def _next(self) -> Job | None:
        """The next piece to fetch; None if there is nothing to fetch or no room."""
        raise NotImplementedError

    def _arrived(self, load: Load) -> None:
        """Handle a piece of ``load`` that has arrived or failed."""
        raise NotImplementedError

    def _wait(self, found: Callable[[], T | None], what: str, check: Check | None) -> T:
        """Wait until ``found`` returns a value, and return it.

        Raises:
            CheckpointError: the reader is closed, or the disk does not answer.
        """
        started = time.perf_counter()
        if (result := self._look(found)) is not None:
            return result
        with waiting(check):
            while True:
                self._changed.wait(POLL_S)
                if check is not None:
                    check()
                if (result := self._look(found)) is not None:
                    return result
                # Last: this thread may have waited for a processor longer than for the disk.
                require_answer(max(started, self._last_arrival), self._stall_s, what)

    def _look(self, found: Callable[[], T | None]) -> T | None:
        if self._closed:
            raise CheckpointError("the model was closed while it was in use")
        return found()

    # -- threads ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (job := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
            assert job is not None, "the loop above ends with one"
            self._fetch(*job)

    def _fetch(self, load: Load, chunk: UnitChunk, after: Event | None) -> None:
        out = load.memory[chunk.start : chunk.start + chunk.nbytes]
        error: LocalrtError | None = None
        try:
            self._source.fetch(load.unit, chunk.start, out, after)
            if self._verify is not None and self._is_last(load, chunk):
                self._verify(load.unit, load.memory)
        except LocalrtError as failure:  # raised in the waiting pass, not in this thread
            error = failure
        except Exception as failure:  # noqa: BLE001 - a thread must not die in silence
            error = CheckpointError(f"{load.unit.file} cannot be read: {failure}")
        with self._changed:
            self._last_arrival = time.perf_counter()
            load.in_flight -= 1
            if error is None:
                self._fetched += chunk.nbytes
                load.missing -= chunk.nbytes
            elif load.error is None:
                load.error = error
                load.waiting.clear()
            self._arrived(load)

    def _is_last(self, load: Load, chunk: UnitChunk) -> bool:
        """Whether all others have been read."""
        with self._changed:
            load.unread -= chunk.nbytes
            return not load.unread


@dataclass(slots=True, eq=False, kw_only=True)
class _UnitLoad(Load):
    """A unit in the ring or being read into it."""

    lease: Lease
    unwanted: bool = False
    used: bool = False  # acquired and not released


class UnitReader(Reader):
    """Keeps the next units of a pass in ``ring``, in a fixed cyclic order. See ``Reader``.

    The order wraps round the end of the model into the next token, so that the disk does not rest
    between tokens; it rests only when the ring is full. Every unit has its own state to wait for:
    there is no barrier. A reading thread calls ``on_arrival`` after each unit.
    """

    def __init__(
        self,
        source: UnitSource,
        ring: Ring[Bytes],
        *,
        threads: int,
        stall_s: float = 60.0,
        verify: Callable[[StoredUnit, Bytes], None] | None = None,
    ) -> None:
        self.on_arrival: Callable[[], None] = lambda: None
        self._ring = ring
        self._order: tuple[StoredUnit, ...] = ()
        self._cursor = 0  # index of the unit to lease next
        self._skips: Counter[str] = Counter()  # how many times to skip a unit
        self._loads: deque[_UnitLoad] = deque()  # oldest first
        self._draining = False  # loads are dropped once nothing of them is in flight
        self._following: tuple[StoredUnit, ...] | None = None  # the order to follow after draining
        self._new_ring: Ring[Bytes] | None = None  # the ring to use after draining
        super().__init__(source, threads=threads, stall_s=stall_s, name="reader", verify=verify)

    @property
    def failed(self) -> bool:
        """Whether fetching a unit ahead has failed."""
        with self._changed:
            return any(load.error is not None for load in self._loads)

    def schedule(self, units: Sequence[StoredUnit], ring: Ring[Bytes] | None = None) -> None:
        """Drop what was fetched; from now on fetch ``units`` in a cycle, from the first.

        ``ring`` replaces the present ring.
        """
        with self._changed:
            self._following = tuple(units)
            self._new_ring = ring or self._new_ring
            self._drop()

    def rewind(self) -> None:
        """Begin again with the first unit: the pass was abandoned."""
        with self._changed:
            self._drop()

    def skip(self, names: Iterable[str]) -> None:
        """Leave each of these units out once: the pass does not want them.

        Every pass acquires or skips each unit of the order, so that a unit which is there already
        is the one of this pass, however many rounds the ring holds.
        """
        with self._changed:
            order = self._order if self._following is None else self._following
            for name in {unit.name for unit in order}.intersection(names):
                load = None if self._draining else self._oldest(name)
                if load is None:
                    self._skips[name] += 1
                else:
                    load.unwanted = True
                    load.waiting.clear()
            self._sweep()
            self._changed.notify_all()

    def acquire(self, name: str, check: Check | None = None) -> Bytes:
        """The bytes of unit ``name`` once they have arrived.

        ``check`` is called while waiting, and may raise to give up. A ``Waiter`` is told of it.

        Raises:
            CheckpointError: the file is truncated or fails, or the disk does not answer.
            ValueError: the unit is not in the order.
        """
        with self._changed:
            # A cancelled pass must not take a unit; the restarted order would lack it.
            if check is not None:
                check()
            return self._wait(lambda: self._take(name), name, check)

    def take(self, name: str) -> Bytes | None:
        """Acquire unit ``name`` if it has arrived; None if it has not, or has failed."""
        with self._changed:
            load = None if self._draining else self._oldest(name)
            return None if load is None or load.error is not None else self._take(name)

    def await_arrival(self, name: str, check: Check | None, unless: Callable[[], bool]) -> None:
        """Wait as ``acquire`` does, without taking the unit, or until ``unless`` says that another
        thread has taken it.
        """
        with self._changed:
            self._wait(lambda: unless() or self._find(name) is not None or None, name, check)

    def release(self, name: str, event: Event | None = None) -> None:
        """Release the memory of ``name`` to later units, once ``event`` has happened."""
        with self._changed:
            for load in self._loads:
                if load.unit.name == name and load.used:
                    load.used = False
                    self._free(load, event)
                    self._finish_draining()
                    return

    # -- under the lock --------------------------------------------------------------------------

    def _take(self, name: str) -> Bytes | None:
        """The unit if it has arrived; it is in use from then on."""
        if (load := self._find(name)) is None:
            return None
        load.used = True
        return load.memory

    def _find(self, name: str) -> _UnitLoad | None:
        """The unit if it has arrived."""
        if self._draining:
            return None
        load = self._oldest(name)
        if load is None:
            if not any(unit.name == name for unit in self._order):
                raise ValueError(f"unit {name} is not among those that are read in each pass")
            return None
        if load.error is not None:
            raise load.error
        return None if load.missing else load

    def _oldest(self, name: str) -> _UnitLoad | None:
        """The oldest load of ``name`` that no pass has taken or skipped."""
        for load in self._loads:
            if load.unit.name == name and not load.unwanted and not load.used:
                return load
        return None

    def _free(self, load: _UnitLoad, event: Event | None = None) -> None:
        self._loads.remove(load)
        self._ring.release(load.lease, event)
        self._changed.notify_all()

    def _sweep(self) -> None:
        """Free loads that are no longer wanted and have nothing in flight."""
        for load in [load for load in self._loads if load.unwanted]:
            if not load.in_flight and not load.waiting:
                self._free(load)

    def _drop(self) -> None:
        self._draining = True
        self._skips.clear()
        for load in self._loads:
            load.waiting.clear()
        self._finish_draining()

    def _finish_draining(self) -> None:
        if not self._draining:
            return
        if any(load.in_flight or load.used for load in self._loads):
            return
        for load in list(self._loads):
            self._free(load)
        if self._following is not None:
            self._order, self._following = self._following, None
        if self._new_ring is not None:
            self._ring.replaced()
            self._ring, self._new_ring = self._new_ring, None
        self._cursor, self._draining = 0, False
        self._changed.notify_all()

    def _next(self) -> Job | None:
        if self._draining or not self._order:
            return None
        last = self._loads[-1] if self._loads else None
        if last is None or not last.waiting:
            while True:
                unit = self._order[self._cursor]
                if not self._skips[unit.name]:
                    break
                self._skips[unit.name] -= 1
                self._advance()
            lease = self._ring.lease(unit.nbytes)
            if lease is None:
                return None
            memory = self._ring.view(lease)
            last = _UnitLoad(unit=unit, memory=memory, waiting=lease.waiting, lease=lease)
            self._loads.append(last)
            self._advance()
        found = self._ring.next_chunk(last.lease)
        if found is None:
            return None
        last.in_flight += 1
        return last, *found

    def _advance(self) -> None:
        self._cursor = (self._cursor + 1) % len(self._order)

    def _fetch(self, load: Load, chunk: UnitChunk, after: Event | None) -> None:
        super()._fetch(load, chunk, after)
        if load.done:
            self.on_arrival()

    def _arrived(self, load: Load) -> None:
        assert isinstance(load, _UnitLoad), "it is in the ring"
        self._finish_draining()
        if load.unwanted:
            self._sweep()
        if load.done or load.error is not None or self._draining:
            self._changed.notify_all()


@dataclass(slots=True, eq=False, kw_only=True)
class DemandLoad(Load):
    """A load that is appended to ``ends`` when it completes or fails."""

    ends: deque[DemandLoad]


class DemandReader(Reader):
    """See ``Reader``. It fetches pieces of ``block`` bytes."""

    def __init__(
        self,
        source: UnitSource,
        *,
        threads: int,
        block: int = 2 << 20,
        stall_s: float = 60.0,
        verify: Callable[[StoredUnit, Bytes], None] | None = None,
    ) -> None:
        self._block = block
        self._urgent: deque[DemandLoad] = deque()
        self._ahead: deque[DemandLoad] = deque()
        super().__init__(source, threads=threads, stall_s=stall_s, name="experts", verify=verify)

    def ask(
        self, unit: StoredUnit, memory: Bytes, *, urgent: bool, ends: deque[DemandLoad]
    ) -> DemandLoad:
        """Begin to read ``unit`` into ``memory``. See ``Load``."""
        waiting = deque(chunks(unit.nbytes, self._block, first=0))
        load = DemandLoad(unit=unit, memory=memory, waiting=waiting, ends=ends)
        with self._changed:
            (self._urgent if urgent else self._ahead).append(load)
            self._changed.notify_all()
        return load

    def hurry(self, load: DemandLoad) -> None:
        """Make a load that was requested ahead urgent."""
        with self._changed:
            if load in self._ahead:
                self._ahead.remove(load)
                self._urgent.append(load)

    def cancel(self, loads: Collection[DemandLoad]) -> list[DemandLoad]:
        """Cancel those of ``loads`` that have not begun, and return them.

        The others are read to their end.
        """
        with self._changed:
            dropped = [
                load
                for load in self._ahead
                if load in loads and not load.in_flight and load.missing == load.unit.nbytes
            ]
            self._ahead = deque(load for load in self._ahead if load not in dropped)
            return dropped

    def wait(self, load: DemandLoad, check: Check | None = None) -> None:
        """Wait until ``load`` is complete. ``check`` is called while waiting, and may raise.

        Raises:
            CheckpointError: the file is truncated or fails, or the disk does not answer.
        """
        with self._changed:
            self._wait(lambda: load.done or None, load.unit.name, check)
            if load.error is not None:
                raise load.error

    def _next(self) -> Job | None:
        queue = self._urgent or self._ahead
        if not queue:
            return None
        load = queue[0]
        chunk = load.waiting.popleft()
        load.in_flight += 1
        if not load.waiting:
            queue.popleft()
        return load, chunk, None

    def _arrived(self, load: Load) -> None:
        assert isinstance(load, DemandLoad), "it was asked for here"
        if load.error is not None:
            for queue in (self._urgent, self._ahead):
                if load in queue:
                    queue.remove(load)
        if load.done:
            load.ends.append(load)
            self._changed.notify_all()
