"""Threads that read what is asked for, the urgent first: experts are known only once chosen.

A ``UnitReader`` follows a fixed order through a ring; here every load has memory of its own and
comes when it is asked for. What is asked for ahead of its need waits while anything is urgent, and
can be called off. It knows ranges of bytes, not experts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from localrt.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.offload.clock import later
from localrt.offload.fetching import POLL_S, Source, end_threads, fetch, require_answer
from localrt.offload.ring import Chunk, Mark, chunks
from localrt.offload.waiting import waiting

__all__ = ["DemandReader", "Load"]

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

    def __post_init__(self) -> None:
        self.missing = self.unit.nbytes

    @property
    def done(self) -> bool:
        """Whether all of it is there, or it has failed and nothing of it is on its way."""
        return self.missing == 0 or (self.error is not None and not self.in_flight)


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
        self._ended: list[Load] = []
        self._closed = False
        self._fetched = 0
        self._last_arrival = 0.0
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

    def ask(
        self, unit: StoredUnit, memory: Any, *, after: Mark = None, urgent: bool = True
    ) -> Load:
        """Begin to fill ``memory`` with ``unit``, not before ``after`` has happened."""
        load = Load(unit, memory, after, deque(chunks(unit.nbytes, self._block, first=0)))
        with self._changed:
            (self._urgent if urgent else self._ahead).append(load)
            self._changed.notify_all()
        return load

    def hurry(self, load: Load) -> None:
        """What was asked for ahead is needed now."""
        with self._changed:
            if load in self._ahead:
                self._ahead.remove(load)
                self._urgent.append(load)

    def call_off(self) -> list[Load]:
        """Begin nothing of what was asked for ahead; returns that of which nothing was read."""
        with self._changed:
            begun = [
                load for load in self._ahead if load.in_flight or load.missing < load.unit.nbytes
            ]
            dropped = [load for load in self._ahead if load not in begun]
            self._ahead = deque(begun)
            return dropped

    def ended(self) -> list[Load]:
        """The loads that have ended, well or not, since this was last asked."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def wait(self, load: Load, check: Check | None = None) -> Mark:
        """Until ``load`` is there: its mark. ``check`` is called meanwhile, and may raise.

        Raises:
            CheckpointError: the file is truncated or fails, or the disk does not answer.
        """
        started = time.perf_counter()
        with self._changed:
            if not load.done:
                with waiting(check):
                    while not load.done:
                        self._changed.wait(POLL_S)
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

    def _next(self) -> tuple[Load, Chunk] | None:
        """The next piece to fetch."""
        queue = self._urgent or self._ahead
        if not queue:
            return None
        load = queue[0]
        chunk = load.waiting.popleft()
        load.in_flight += 1
        if not load.waiting:
            queue.popleft()
        return load, chunk

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (job := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
            assert job is not None, "the loop above ends with one"
            self._fetch(*job)

    def _fetch(self, load: Load, chunk: Chunk) -> None:
        out = load.memory[chunk.start : chunk.start + chunk.nbytes]
        mark, error = fetch(self._source, load.unit, chunk.start, out, load.after)
        with self._changed:
            self._last_arrival = time.perf_counter()
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
                self._ended.append(load)
                self._changed.notify_all()
