"""Reader threads that keep the next units of a pass in a ring, in a fixed cyclic order.

The order wraps round the end of the model into the next token, so that the disk does not rest
between tokens; it rests only when the ring is full. Every unit has its own state to wait for: there
is no barrier. It knows ranges of files and bytes of memory, not weights.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.offload.files import FileReader
from localrt.offload.ring import Chunk, Lease, Ring
from localrt.offload.trace import Trace

__all__ = ["UnitReader"]

Bytes = npt.NDArray[np.uint8]
Check = Callable[[], None]

_POLL_S = 0.05  # how soon a waiting pass notices that it was cancelled


@dataclass(slots=True, eq=False)
class _Load:
    """A unit in the ring or on its way there."""

    unit: StoredUnit
    lease: Lease
    missing: int  # bytes that have not arrived
    in_flight: int = 0
    error: LocalrtError | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or self.missing == 0


@dataclass(slots=True)
class _State:
    """What the lock guards."""

    order: tuple[StoredUnit, ...] = ()
    cursor: int = 0  # of the unit that is leased next
    skipped: frozenset[str] = frozenset()  # until the cursor comes round
    loads: deque[_Load] = field(default_factory=deque)  # oldest first
    draining: bool = False  # loads are dropped once nothing of them is in flight
    following: tuple[StoredUnit, ...] | None = None  # the order to take up after that
    closed: bool = False
    bytes_read: int = 0
    last_arrival: float = 0.0


class UnitReader:
    """``threads`` read from ``files`` into ``ring``. ``stall_s``: how long a disk may be silent."""

    def __init__(
        self,
        files: FileReader,
        ring: Ring,
        *,
        threads: int,
        trace: Trace,
        stall_s: float = 60.0,
    ) -> None:
        self._files = files
        self._ring = ring
        self._trace = trace
        self._stall_s = stall_s
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
            return self._state.bytes_read

    def schedule(self, units: Sequence[StoredUnit]) -> None:
        """Read ``units`` from now on, again and again, from the first; drop what was read."""
        with self._changed:
            self._state.following = tuple(units)
            self._drop()

    def rewind(self) -> None:
        """Begin again with the first unit, since the pass was abandoned."""
        with self._changed:
            self._drop()

    def skip(self, names: Iterable[str]) -> None:
        """Leave out those of ``names`` that are not on their way yet, in this round only."""
        with self._changed:
            self._state.skipped = frozenset(names)

    def acquire(self, name: str, check: Check | None = None) -> Bytes:
        """The bytes of unit ``name`` once they have arrived; units before it are passed over.

        ``check`` is called while waiting, and may raise to give up.

        Raises:
            CheckpointError: the file is truncated or fails, or the disk does not answer.
            ValueError: the unit is not in the order.
        """
        started = time.perf_counter()
        with self._changed:
            while True:
                load = self._front(name)
                if load is not None and load.done:
                    if load.error is not None:
                        raise load.error
                    return self._ring.view(load.lease)
                self._changed.wait(_POLL_S)
                silent = time.perf_counter() - max(started, self._state.last_arrival)
                if silent > self._stall_s:
                    raise CheckpointError(
                        f"the disk has not answered for {silent:.0f} seconds (reading {name}): "
                        "check the drive that the model is on"
                    )
                if check is not None:
                    check()

    def release(self, name: str) -> None:
        """Give the memory of ``name``, which was acquired, to the units that follow."""
        with self._changed:
            loads = self._state.loads
            if not loads or loads[0].unit.name != name:
                return  # dropped in the meantime
            self._ring.release(loads.popleft().lease)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads. A read that hangs is left behind; its thread ends with it."""
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2.0)

    # -- under the lock --------------------------------------------------------------------------

    def _front(self, name: str) -> _Load | None:
        """The load of ``name``, those before it given up; None while it is not leased yet."""
        state = self._state
        if state.draining:
            return None
        if not any(unit.name == name for unit in state.order):
            raise ValueError(f"unit {name} is not among those that are read in each pass")
        while state.loads and state.loads[0].unit.name != name:
            first = state.loads[0]
            if first.in_flight or (first.lease.waiting and first.error is None):
                return None  # it has to arrive before its memory can be used again
            self._ring.release(state.loads.popleft().lease)
            self._changed.notify_all()
        return state.loads[0] if state.loads else None

    def _drop(self) -> None:
        state = self._state
        state.draining = True
        for load in state.loads:
            load.lease.waiting.clear()
        self._finish_draining()

    def _finish_draining(self) -> None:
        state = self._state
        if not state.draining or any(load.in_flight for load in state.loads):
            return
        while state.loads:
            self._ring.release(state.loads.popleft().lease)
        if state.following is not None:
            state.order, state.following = state.following, None
        state.cursor, state.draining, state.skipped = 0, False, frozenset()
        self._changed.notify_all()

    def _next(self) -> tuple[_Load, Chunk] | None:
        """The next chunk to read, if its place in the ring is free."""
        state = self._state
        if state.draining or not state.order:
            return None
        last = state.loads[-1] if state.loads else None
        if last is None or not last.lease.waiting:
            while (unit := state.order[state.cursor]).name in state.skipped:
                self._advance()
            lease = self._ring.lease(unit.nbytes)
            if lease is None:
                return None
            last = _Load(unit, lease, unit.nbytes)
            state.loads.append(last)
            self._advance()
        chunk = self._ring.next_chunk(last.lease)
        if chunk is None:
            return None
        last.in_flight += 1
        return last, chunk

    def _advance(self) -> None:
        state = self._state
        state.cursor = (state.cursor + 1) % len(state.order)
        if state.cursor == 0:
            state.skipped = frozenset()

    # -- reader threads --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while (job := self._next()) is None and not self._state.closed:
                    self._changed.wait()
                if job is None or self._state.closed:
                    return
            self._read(*job)

    def _read(self, load: _Load, chunk: Chunk) -> None:
        unit, error = load.unit, None
        out = self._ring.view(load.lease)[chunk.start : chunk.start + chunk.nbytes]
        started = self._trace.begin("ssd")
        try:
            self._files.read_into(unit.file, unit.offset + chunk.start, out)
        except LocalrtError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - a thread must not die in silence
            error = CheckpointError(f"{unit.file} cannot be read: {failure}")
        ended = self._trace.end("ssd", unit.name, started)
        with self._changed:
            state = self._state
            state.last_arrival = ended
            state.bytes_read += 0 if error else chunk.nbytes
            load.in_flight -= 1
            load.missing -= chunk.nbytes
            if error is not None and load.error is None:
                load.error = error
                load.lease.waiting.clear()
            self._finish_draining()
            if load.done or state.draining:
                self._changed.notify_all()
