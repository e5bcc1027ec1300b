"""Threads that keep the next units of a pass in a ring, in a fixed cyclic order.

The order wraps round the end of the model into the next token, so that the disk does not rest
between tokens; it rests only when the ring is full. Every unit has its own state to wait for: there
is no barrier. The same code reads from the SSD into RAM and copies from RAM to a GPU: a ``Source``
knows how; this module knows ranges of bytes, not weights.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from localrt.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.timing import Mark
from localrt.offload.reading.fetching import POLL_S, Source, end_threads, fetch, require_answer
from localrt.offload.reading.waiting import waiting
from localrt.offload.ring import Chunk, Lease, Ring

__all__ = ["UnitReader"]

Check = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Load:
    """A unit in the ring or on its way there."""

    unit: StoredUnit
    lease: Lease
    missing: int  # bytes that have not arrived
    in_flight: int = 0
    unwanted: bool = False
    used: bool = False  # acquired and not released
    error: LocalrtError | None = None
    mark: Mark = None

    @property
    def done(self) -> bool:
        return self.error is not None or self.missing == 0


@dataclass(slots=True)
class _State:
    """What the lock guards."""

    order: tuple[StoredUnit, ...] = ()
    cursor: int = 0  # of the unit that is leased next
    skips: Counter[str] = field(default_factory=Counter)  # times that a unit is left out
    loads: deque[_Load] = field(default_factory=deque)  # oldest first
    draining: bool = False  # loads are dropped once nothing of them is in flight
    following: tuple[StoredUnit, ...] | None = None  # the order to take up after that
    ring: Ring | None = None  # and the ring
    closed: bool = False
    fetched: int = 0
    last_arrival: float = 0.0


class UnitReader:
    """``threads`` fetch from ``source`` into ``ring``.

    ``stall_s``: how long a disk may be silent. ``join``: how the marks of a unit's chunks become
    one (default: the last). ``drained`` is called when all that was dropped has ended, before
    anything else is fetched.
    """

    def __init__(
        self,
        source: Source,
        ring: Ring,
        *,
        threads: int,
        stall_s: float = 60.0,
        join: Callable[[Mark, Mark], Mark] | None = None,
        drained: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._ring = ring
        self._stall_s = stall_s
        self._join = join or (lambda _, last: last)
        self._drained = drained
        self._state = _State()
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"localrt-reader-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def bytes_read(self) -> int:
        """Bytes that have arrived since construction, dropped ones included."""
        with self._changed:
            return self._state.fetched

    @property
    def failed(self) -> bool:
        """Whether a unit that nobody has asked for yet could not be fetched."""
        with self._changed:
            return any(load.error is not None for load in self._state.loads)

    def schedule(self, units: Sequence[StoredUnit], ring: Ring | None = None) -> None:
        """Fetch ``units`` from now on, again and again, from the first; drop what was fetched.

        ``ring`` takes the place of the one so far.
        """
        with self._changed:
            self._state.following = tuple(units)
            self._state.ring = ring or self._state.ring
            self._drop()

    def rewind(self) -> None:
        """Begin again with the first unit, since the pass was abandoned."""
        with self._changed:
            self._drop()

    def skip(self, names: Iterable[str], *, finish: bool = False) -> None:
        """Leave each of these units out once: the pass does not want them.

        Every pass acquires or skips each unit of the order, so that a unit which is there already
        is the one of this pass, however many rounds the ring holds. With ``finish`` what is on its
        way is fetched to its end, since the source gives it once.
        """
        with self._changed:
            state = self._state
            order = state.order if state.following is None else state.following
            for name in {unit.name for unit in order}.intersection(names):
                load = None if state.draining else self._oldest(name)
                if load is None:
                    state.skips[name] += 1
                else:
                    load.unwanted = True
                    if not finish:
                        load.lease.waiting.clear()
            self._sweep()
            self._changed.notify_all()

    def acquire(self, name: str, check: Check | None = None) -> tuple[Any, Mark]:
        """The bytes of unit ``name`` once they have arrived, and their mark.

        ``check`` is called while waiting, and may raise to give up. A ``Waiter`` is told of it.

        Raises:
            CheckpointError: the file is truncated or fails, or the disk does not answer.
            ValueError: the unit is not in the order.
        """
        started = time.perf_counter()
        with self._changed:
            # Who has given up takes nothing: it would be missing where the order begins again.
            if check is not None:
                check()
            found = self._take(name)
            if found is not None:
                return found
            with waiting(check):
                while True:
                    self._changed.wait(POLL_S)
                    if check is not None:
                        check()
                    found = self._take(name)
                    if found is not None:
                        return found
                    # Last: this thread may have waited for a processor longer than for the disk.
                    since = max(started, self._state.last_arrival)
                    require_answer(since, self._stall_s, name)

    def release(self, name: str, mark: Mark = None) -> None:
        """Give the memory of ``name`` to the units that follow, once ``mark`` has happened."""
        with self._changed:
            for load in self._state.loads:
                if load.unit.name == name and load.used:
                    load.used = False
                    self._free(load, mark)
                    self._finish_draining()
                    return

    def close(self) -> None:
        """End the threads. A read that hangs is left behind; its thread ends with it."""
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
        end_threads(self._threads)

    # -- under the lock --------------------------------------------------------------------------

    def _take(self, name: str) -> tuple[Any, Mark] | None:
        """The unit if it has arrived; it is in use from then on."""
        load = self._find(name)
        if load is None or not load.done:
            return None
        if load.error is not None:
            raise load.error
        load.used = True
        return self._ring.view(load.lease), load.mark

    def _find(self, name: str) -> _Load | None:
        """The oldest load of ``name`` that is to be used; None while there is none."""
        state = self._state
        if state.closed:
            raise CheckpointError("the model was closed while it was in use")
        if state.draining:
            return None
        load = self._oldest(name)
        if load is None and not any(unit.name == name for unit in state.order):
            raise ValueError(f"unit {name} is not among those that are read in each pass")
        return load

    def _oldest(self, name: str) -> _Load | None:
        """The oldest load of ``name`` that no pass has taken or skipped."""
        for load in self._state.loads:
            if load.unit.name == name and not load.unwanted and not load.used:
                return load
        return None

    def _free(self, load: _Load, mark: Mark = None) -> None:
        self._state.loads.remove(load)
        self._ring.release(load.lease, mark)
        self._changed.notify_all()

    def _sweep(self) -> None:
        """Free what nobody wants, as far as it has arrived."""
        for load in [load for load in self._state.loads if load.unwanted]:
            if not load.in_flight and not load.lease.waiting:
                self._free(load)

    def _drop(self) -> None:
        state = self._state
        state.draining = True
        state.skips.clear()
        for load in state.loads:
            load.lease.waiting.clear()
        self._finish_draining()

    def _finish_draining(self) -> None:
        state = self._state
        if not state.draining or any(load.in_flight or load.used for load in state.loads):
            return
        for load in list(state.loads):
            self._free(load)
        if state.following is not None:
            state.order, state.following = state.following, None
        if state.ring is not None:
            self._ring, state.ring = state.ring, None
        state.cursor, state.draining = 0, False
        self._drained()
        self._changed.notify_all()

    def _next(self) -> tuple[_Load, Chunk, Mark] | None:
        """The next chunk to fetch, if its place in the ring is free."""
        state = self._state
        if state.draining or not state.order:
            return None
        last = state.loads[-1] if state.loads else None
        if last is None or not last.lease.waiting:
            while True:
                unit = state.order[state.cursor]
                if any(load.unit is unit and not load.done for load in state.loads):
                    return None  # a source gives a unit once before it gives it again
                if not state.skips[unit.name]:
                    break
                state.skips[unit.name] -= 1
                self._source.skip(unit)
                self._advance()
            lease = self._ring.lease(unit.nbytes)
            if lease is None:
                return None
            last = _Load(unit, lease, unit.nbytes)
            state.loads.append(last)
            self._advance()
        found = self._ring.next_chunk(last.lease)
        if found is None:
            return None
        last.in_flight += 1
        return last, *found

    def _advance(self) -> None:
        state = self._state
        state.cursor = (state.cursor + 1) % len(state.order)

    # -- reader threads --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._state.closed and (job := self._next()) is None:
                    self._changed.wait()
                if self._state.closed:
                    return
            assert job is not None, "the loop above ends with one"
            self._fetch(*job)

    def _fetch(self, load: _Load, chunk: Chunk, after: Mark) -> None:
        ring = self._ring  # stays while anything is on its way
        out = ring.view(load.lease)[chunk.start : chunk.start + chunk.nbytes]
        mark, error = fetch(self._source, load.unit, chunk.start, out, after)
        with self._changed:
            state = self._state
            state.last_arrival = time.perf_counter()
            state.fetched += 0 if error else chunk.nbytes
            load.in_flight -= 1
            load.missing -= chunk.nbytes
            load.mark = mark if load.mark is None else self._join(load.mark, mark)
            if error is not None and load.error is None:
                load.error = error
                load.lease.waiting.clear()
            self._finish_draining()
            if load.unwanted:
                self._sweep()
            if load.done or state.draining:
                self._changed.notify_all()
