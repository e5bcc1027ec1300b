"""Threads that read what is asked for, the urgent first: experts are known only once chosen.

A ``UnitReader`` follows a fixed order through a ring; here every load has memory of its own and
comes when it is asked for. What is asked for ahead of its need waits while anything is urgent, and
can be called off: nothing urgent waits for more of it than the pieces that are being read. It knows
ranges of bytes, not experts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from localrt.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.timing import Mark
from localrt.offload.cards.clock import later
from localrt.offload.reading.fetching import POLL_S, Source, end_threads, fetch, require_answer
from localrt.offload.reading.waiting import waiting
from localrt.offload.ring import Chunk, chunks

__all__ = ["DemandReader", "Load", "ReadingTime"]

Check = Callable[[], None]


@dataclass(slots=True, eq=False)
class Load:
    """A unit on its way into ``memory``. ``mark`` says when it is there, once it is ``done``."""

    unit: StoredUnit
    memory: Any
    after: Mark
    waiting: deque[Chunk]
    missing: int = field(init=False)
    in_flight: int = 0
    error: LocalrtError | None = None
    mark: Mark = None
    cancelled: bool = False
    ends: deque[Load] | None = None  # where it goes when it has ended, well or not

    def __post_init__(self) -> None:
        self.missing = self.unit.nbytes

    @property
    def done(self) -> bool:
        """Whether all of it is there, or it has ended early and nothing of it is on its way."""
        ended = self.cancelled or self.error is not None
        return self.missing == 0 or (ended and not self.in_flight)


@dataclass(frozen=True, slots=True)
class ReadingTime:
    """Of what was urgent: seconds in which any was being read, and loads. Of all: CPU seconds."""

    busy_s: float
    loads: int
    cpu_s: float


class DemandReader:
    """``threads`` fetch from ``source`` in pieces of ``block`` bytes.

    ``stall_s``: how long a disk may be silent before a pass that waits for it gives up.
    """

    def __init__(
        self, source: Source, *, threads: int, block: int = 2 << 20, stall_s: float = 60.0
    ) -> None:
        self._source = source
        self._block = block
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._urgent: deque[Load] = deque()
        self._ahead: deque[Load] = deque()
        self._closed = False
        self._fetched = 0
        self._last_arrival = 0.0
        self._pressing = 0  # urgent pieces that are being read, and since when any
        self._pressing_since = 0.0
        self._busy_s = self._cpu_s = 0.0
        self._loads = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"localrt-experts-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def bytes_read(self) -> int:
        """Bytes that have arrived since construction."""
        with self._changed:
            return self._fetched

    def time(self) -> ReadingTime:
        """Since construction, up to the last piece that has arrived."""
        with self._changed:
            return ReadingTime(self._busy_s, self._loads, self._cpu_s)

    def ask(
        self,
        unit: StoredUnit,
        memory: Any,
        *,
        after: Mark = None,
        urgent: bool = True,
        ends: deque[Load] | None = None,
    ) -> Load:
        """Begin to fill ``memory`` with ``unit``, not before ``after`` has happened.

        When it has ended, well or not, the load is appended to ``ends``.
        """
        load = Load(unit, memory, after, deque(chunks(unit.nbytes, self._block, first=0)))
        load.ends = ends
        with self._changed:
            (self._urgent if urgent else self._ahead).append(load)
            self._loads += urgent
            self._changed.notify_all()
        return load

    def hurry(self, load: Load) -> None:
        """What was asked for ahead is needed now."""
        with self._changed:
            if load in self._ahead:
                self._ahead.remove(load)
                self._urgent.append(load)

    def call_off(self, loads: Collection[Load]) -> list[Load]:
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

    def cancel(self, load: Load) -> bool:
        """Read no more of what was asked for ahead; whether its memory is free now.

        If not it has ended when the pieces that are being read have come.
        """
        with self._changed:
            load.cancelled = True
            load.waiting.clear()
            if load in self._ahead:
                self._ahead.remove(load)
            return not load.in_flight

    def wait(self, load: Load, check: Check | None = None) -> Mark:
        """Until ``load`` is there: its mark. ``check`` is called meanwhile, and may raise.

        Raises:
            CheckpointError: the file is truncated or fails, or the disk does not answer.
        """
        started = time.perf_counter()
        with self._changed:
            if not load.done:
                with waiting(check):
                    while not self._changed.wait_for(lambda: load.done, POLL_S):
                        self._require_life(load, started)
                        if check is not None:
                            check()
            if load.error is not None:
                raise load.error
            return load.mark

    def close(self) -> None:
        """End the threads. A read that hangs is left behind; its thread ends with it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end_threads(self._threads)

    def _require_life(self, load: Load, started: float) -> None:
        if self._closed:
            raise CheckpointError("the model was closed while it was in use")
        require_answer(max(started, self._last_arrival), self._stall_s, load.unit.name)

    def _next(self) -> tuple[Load, Chunk, bool] | None:
        """The next piece to fetch, and whether it is urgent."""
        urgent = bool(self._urgent)
        queue = self._urgent or self._ahead
        if not queue:
            return None
        load = queue[0]
        chunk = load.waiting.popleft()
        load.in_flight += 1
        if not load.waiting:
            queue.popleft()
        if urgent:
            if not self._pressing:
                self._pressing_since = time.perf_counter()
            self._pressing += 1
        return load, chunk, urgent

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (job := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
            assert job is not None, "the loop above ends with one"
            self._fetch(*job)

    def _fetch(self, load: Load, chunk: Chunk, urgent: bool) -> None:
        out = load.memory[chunk.start : chunk.start + chunk.nbytes]
        # A trace shows which reads nobody was waiting for.
        unit = load.unit if urgent else replace(load.unit, name=f"{load.unit.name} ahead")
        working = time.thread_time()
        mark, error = fetch(self._source, unit, chunk.start, out, load.after)
        working = time.thread_time() - working
        with self._changed:
            self._last_arrival = time.perf_counter()
            self._cpu_s += working
            if urgent:
                self._pressing -= 1
                if not self._pressing:
                    self._busy_s += self._last_arrival - self._pressing_since
            load.in_flight -= 1
            if error is None:
                self._fetched += chunk.nbytes
                load.missing -= chunk.nbytes
                load.mark = mark if load.mark is None else later(load.mark, mark)
            elif load.error is None:
                load.error = error
                load.waiting.clear()
                for queue in (self._urgent, self._ahead):
                    if load in queue:
                        queue.remove(load)
            if load.done:
                if load.ends is not None:
                    load.ends.append(load)
                self._changed.notify_all()
