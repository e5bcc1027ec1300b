"""Threads that fetch units, piece by piece, and passes that wait for them.

``Reader`` has what all reading has in common: loads and their pieces, errors, a disk that is
silent, the threads' end. Which piece comes next is for its two kinds to say: ``UnitReader`` follows
a fixed order through a ring, ``DemandReader`` reads experts, which are known only once chosen: the
urgent first, then those that are expected.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from localrt.common.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.weight_store import Check
from localrt.offload.device.gpu import Event
from localrt.offload.reading import reader
from localrt.offload.ring import Chunk, chunks

POLL_S = 0.05
"""Seconds until a waiting pass notices that it was cancelled."""
_CLOSE_S = 2.0  # how long closing waits for reads on their way
T = TypeVar("T")


class Source(Protocol):
    """Where units come from. Used by several threads at once."""

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Event | None) -> None:
        """Fill ``out`` with the unit's bytes from ``start`` on, not before ``after`` has happened.

        Raises:
            LocalrtError: they cannot be had.
        """

    def skip(self, unit: StoredUnit) -> None:
        """The unit is left out once: in the order of ``fetch``, after all of what came before."""


@runtime_checkable
class Waiter(Protocol):
    """A check that is told when its pass waits for weights: others may use the processor then."""

    def __call__(self) -> None:
        """Raises to abandon the pass."""

    def waiting(self) -> AbstractContextManager[None]:
        """Held while the pass waits and computes nothing."""


def waiting(check: Check | None) -> AbstractContextManager[None]:
    """What to hold while waiting, for a check of either kind."""
    return check.waiting() if isinstance(check, Waiter) else nullcontext()


def require_answer(since: float, stall_s: float, what: str) -> None:
    """Raises CheckpointError when nothing has come for ``stall_s`` seconds ``since`` then."""
    silent = time.perf_counter() - since
    if silent > stall_s:
        raise CheckpointError(
            f"the disk has not answered for {silent:.0f} seconds (reading {what}): check the drive "
            "that the model is on"
        )


def wait_for_all(
    reads: Sequence[Future[None]], what: str, stall_s: float, check: Check | None = None
) -> None:
    """Until all of ``reads`` are done. Never waits in a read itself: a disk may hang.

    Raises:
        CheckpointError: one failed, or none of them ends for ``stall_s`` seconds.
    """
    latest, count = time.perf_counter(), 0
    try:
        while True:
            done, left = wait(reads, POLL_S, FIRST_EXCEPTION)
            for read in done:
                read.result()
            if not left:
                return
            if len(done) > count:
                latest, count = time.perf_counter(), len(done)
            require_answer(latest, stall_s, what)
            if check is not None:
                check()
    finally:
        for read in reads:
            read.cancel()


@dataclass(slots=True, eq=False, kw_only=True)
class Load:
    """A unit on its way into ``memory``.

    ``waiting`` are the pieces that nobody has begun, ``missing`` the bytes that have not arrived.
    """

    unit: StoredUnit
    memory: Any
    waiting: deque[Chunk]
    missing: int = field(init=False)
    in_flight: int = 0
    error: LocalrtError | None = None

    def __post_init__(self) -> None:
        self.missing = self.unit.nbytes

    @property
    def done(self) -> bool:
        """Whether all of it is there, or it has failed and nothing of it is on its way."""
        return self.missing == 0 or (self.error is not None and not self.in_flight)


Job = tuple[Load, Chunk, "Event | None"]
"""A piece to fetch, not before the event has happened."""


class Reader:
    """``threads`` fetch from ``source``. ``stall_s``: how long a disk may be silent.

    Methods with an underscore, but ``_run`` and ``_fetch``, are called with the lock held.
    """

    def __init__(self, source: Source, *, threads: int, stall_s: float, name: str) -> None:
        self._source = source
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
        """Bytes that have arrived since construction, dropped ones included."""
        with self._changed:
            return self._fetched

    def close(self) -> None:
        """End the threads. A read that hangs is left behind; its thread ends with it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.perf_counter() + _CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, end - time.perf_counter()))

    def _next(self) -> Job | None:
        """What to fetch next; None while there is nothing, or no room."""
        raise NotImplementedError

    def _arrived(self, load: Load) -> None:
        """A piece of ``load`` has come, or has failed."""
        raise NotImplementedError

    def _wait(self, found: Callable[[], T | None], what: str, check: Check | None) -> T:
        """What ``found`` gives, as soon as it is not None.

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

    def _fetch(self, load: Load, chunk: Chunk, after: Event | None) -> None:
        out = load.memory[chunk.start : chunk.start + chunk.nbytes]
        error: LocalrtError | None = None
        try:
            self._source.fetch(load.unit, chunk.start, out, after)
        except LocalrtError as failure:  # it is the pass's that waits, not the thread's
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


@dataclass(slots=True, eq=False, kw_only=True)
class DemandLoad(reader.Load):
    """Appended to ``ends`` when it has ended, well or not."""

    ends: deque[DemandLoad]


class DemandReader(reader.Reader):
    """See ``Reader``. It fetches pieces of ``block`` bytes."""

    def __init__(
        self, source: reader.Source, *, threads: int, block: int = 2 << 20, stall_s: float = 60.0
    ) -> None:
        self._block = block
        self._urgent: deque[DemandLoad] = deque()
        self._ahead: deque[DemandLoad] = deque()
        super().__init__(source, threads=threads, stall_s=stall_s, name="experts")

    def ask(
        self, unit: StoredUnit, memory: Any, *, urgent: bool, ends: deque[DemandLoad]
    ) -> DemandLoad:
        """Begin to fill ``memory`` with ``unit``. See ``Load``."""
        waiting = deque(chunks(unit.nbytes, self._block, first=0))
        load = DemandLoad(unit=unit, memory=memory, waiting=waiting, ends=ends)
        with self._changed:
            (self._urgent if urgent else self._ahead).append(load)
            self._changed.notify_all()
        return load

    def hurry(self, load: DemandLoad) -> None:
        """What was asked for ahead is needed now."""
        with self._changed:
            if load in self._ahead:
                self._ahead.remove(load)
                self._urgent.append(load)

    def cancel(self, loads: Collection[DemandLoad]) -> list[DemandLoad]:
        """Of ``loads`` that were asked for ahead begin none; returns those of which none was read.

        The others come all the same.
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
        """Until ``load`` is there. ``check`` is called while waiting, and may raise.

        Raises:
            CheckpointError: the file is truncated or fails, or the disk does not answer.
        """
        with self._changed:
            self._wait(lambda: load.done or None, load.unit.name, check)
            if load.error is not None:
                raise load.error

    def _next(self) -> reader.Job | None:
        queue = self._urgent or self._ahead
        if not queue:
            return None
        load = queue[0]
        chunk = load.waiting.popleft()
        load.in_flight += 1
        if not load.waiting:
            queue.popleft()
        return load, chunk, None

    def _arrived(self, load: reader.Load) -> None:
        assert isinstance(load, DemandLoad), "it was asked for here"
        if load.error is not None:
            for queue in (self._urgent, self._ahead):
                if load in queue:
                    queue.remove(load)
        if load.done:
            load.ends.append(load)
            self._changed.notify_all()
