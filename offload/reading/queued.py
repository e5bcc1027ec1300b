"""Copies units over the link into a GPU's ring, ahead of the pass that needs them: units that stay
in RAM, and units that the CPU's ring reads from the SSD.

No card has run this yet.

Copies are queued on a stream as soon as they are possible: by the pass when it releases a unit, or
by the thread that has read one. Events keep them in order with the kernels, so no thread waits for
a copy, and the link has its next ones as soon as there is room for them.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Event, Gpu
from localrt.offload.reading.reader import UnitReader
from localrt.offload.ring import Lease, Ring, fixed_places
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Memory
from localrt.quant.ops.protocol import Check


@dataclass(slots=True, eq=False)
class _Copy:
    """A unit in the ring: its copy is queued whole, or in part, or waits for its bytes."""

    unit: StoredUnit
    lease: Lease
    source: Bytes | None = None
    is_read: bool = False  # from the reader's ring, which holds it until the copy is queued
    queued: bool = False
    copied: Event | None = None
    used: bool = False  # acquired and not released


class QueuedCopies:
    """Keeps the next units of a pass in the GPU's ``ring``, in a fixed cyclic order.

    ``resident`` returns the bytes of units in RAM, ``reader`` reads the others. While the order
    stays, a unit has the same place in every pass: recorded graphs read it there. A pass acquires
    or skips every unit of the order.
    """

    def __init__(
        self,
        gpu: Gpu,
        ring: Ring[Memory],
        resident: Callable[[str], Bytes | None],
        reader: UnitReader | None,
    ) -> None:
        self._gpu, self._ring, self._resident, self._reader = gpu, ring, resident, reader
        self._lock = threading.Lock()  # the reader's is taken within it
        self._order: tuple[StoredUnit, ...] = ()
        self._places: list[int] = []
        self._cursor = 0  # index of the unit to lease next
        self._skips: Counter[str] = Counter()  # how many times to skip a unit
        self._copies: deque[_Copy] = deque()  # oldest first; only the last is not queued whole
        self._error: BaseException | None = None
        self._stopped = False
        if reader is not None:
            reader.on_arrival = self._arrived

    @property
    def room(self) -> int:
        """Bytes of the ring."""
        return self._ring.nbytes

    @property
    def failed(self) -> bool:
        """Whether queueing a copy has failed."""
        return self._error is not None

    def stop(self) -> None:
        """Drop queued copies and queue none until ``schedule`` or ``rewind``; waits for running
        copies, so that memory may be freed.
        """
        with self._lock:
            self._stopped = True
            self._gpu.settle_copies()
            self._drop()

    def close(self) -> None:
        """End copying; a pass that still needs units fails."""
        self.stop()
        self._error = CheckpointError("the model was closed while it was in use")

    def schedule(self, units: Sequence[StoredUnit]) -> None:
        """Copy ``units`` in a cycle from now on, from the first."""
        with self._lock:
            self._drop()
            self._order = tuple(units)
            self._places = fixed_places([unit.nbytes for unit in units], self._ring.nbytes)
            self._begin()

    def place(self, name: str) -> Memory:
        """The ring's memory of unit ``name``, which is in the order."""
        units = zip(self._order, self._places, strict=True)
        unit, start = next((unit, start) for unit, start in units if unit.name == name)
        return self._ring.memory[start : start + unit.nbytes]

    def rewind(self) -> None:
        """Begin again with the first unit after an abandoned pass; rewind the reader first."""
        with self._lock:
            self._drop()
            self._begin()

    def skip(self, names: Iterable[str]) -> None:
        """Skip each of these units once: the pass does not need them."""
        with self._lock:
            for name in {unit.name for unit in self._order}.intersection(names):
                copy = self._oldest(name)
                if copy is None:
                    self._skips[name] += 1
                if (copy is None or copy.source is None) and self._resident(name) is None:
                    assert self._reader is not None, "units that are not resident are read"
                    self._reader.skip([name])
                if copy is not None:
                    self._free(copy)
            self._queue()

    def acquire(self, name: str, check: Check | None = None) -> Memory:
        """The GPU's memory of unit ``name``; kernels from now on wait for its copy.

        The host waits only for a unit that has not been read. ``check`` is called meanwhile.

        Raises:
            LocalrtError: the unit cannot be read or copied.
            ValueError: the unit is not in the order.
        """
        while True:
            with self._lock:
                if check is not None:
                    check()  # a cancelled pass must not take a unit
                self._queue()
                if self._error is not None:
                    raise self._error
                copy = self._oldest(name)
                if copy is None:
                    raise ValueError(f"unit {name} is not the next of those that are copied")
                if copy.queued:
                    copy.used = True
                    self._gpu.wait(copy.copied)
                    return self._ring.view(copy.lease)
                assert copy.source is None, "there is room for what a pass holds at once"
            assert self._reader is not None, "what is resident need not be waited for"
            self._reader.await_arrival(name, check, partial(self._needs_no_wait, copy))

    def release(self, name: str, event: Event | None = None) -> None:
        """Release the memory of ``name`` to later units, once ``event`` has happened."""
        with self._lock:
            for copy in self._copies:
                if copy.unit.name == name and copy.used:
                    self._copies.remove(copy)
                    self._ring.release(copy.lease, event)
                    break
            self._queue()

    # -- under the lock --------------------------------------------------------------------------

    def _arrived(self) -> None:
        with self._lock:
            self._queue()

    def _needs_no_wait(self, copy: _Copy) -> bool:
        """Whether another thread has queued it, or failed; called without the lock."""
        return copy.queued or self._error is not None

    def _begin(self) -> None:
        self._cursor, self._stopped, self._error = 0, False, None
        self._queue()

    def _oldest(self, name: str) -> _Copy | None:
        """The oldest copy of ``name`` that no pass has taken."""
        found = (copy for copy in self._copies if copy.unit.name == name and not copy.used)
        return next(found, None)

    def _drop(self) -> None:
        self._skips.clear()
        for copy in list(self._copies):
            self._free(copy)

    def _free(self, copy: _Copy) -> None:
        """Drop a copy. Its queued pieces still run, before later copies to the same bytes."""
        if copy.source is not None and not copy.queued:
            self._end(copy)
        copy.lease.waiting.clear()
        self._copies.remove(copy)
        self._ring.release(copy.lease)

    def _queue(self) -> None:
        """Queue the copies of units that have arrived, as far as there is room."""
        if self._stopped or self._error is not None:
            return
        try:
            while (copy := self._next()) is not None and self._queue_all(copy):
                pass
        except BaseException as error:
            self._error = error  # the pass that needs the unit raises it
            if not isinstance(error, Exception):
                raise

    def _next(self) -> _Copy | None:
        """The copy to continue: the last one, or one of the next unit if there is room."""
        if self._copies and not self._copies[-1].queued:
            return self._copies[-1]
        while self._order:
            unit, place = self._order[self._cursor], self._places[self._cursor]
            skipped = self._skips[unit.name] > 0
            lease = None if skipped else self._ring.lease(unit.nbytes, place)
            if lease is None and not skipped:
                break
            self._cursor = (self._cursor + 1) % len(self._order)
            if lease is not None:
                self._copies.append(_Copy(unit, lease))
                return self._copies[-1]
            self._skips[unit.name] -= 1
        return None

    def _queue_all(self, copy: _Copy) -> bool:
        """Queue the pieces of a copy that fit; returns whether the copy is complete."""
        name, memory = copy.unit.name, self._ring.view(copy.lease)
        if copy.source is None:
            copy.source = self._resident(name)
        if copy.source is None:
            assert self._reader is not None, "units that are not resident are read"
            copy.source = self._reader.take(name)
            copy.is_read = copy.source is not None
        if copy.source is None:
            return False
        while (found := self._ring.next_chunk(copy.lease)) is not None:
            piece, after = found
            span = slice(piece.start, piece.start + piece.nbytes)
            self._gpu.queue_copy(name, copy.source[span], memory[span], after)
        if copy.lease.waiting:
            return False
        self._end(copy)
        return True

    def _end(self, copy: _Copy) -> None:
        """Complete a copy: the reader may reuse its memory."""
        copy.copied = self._gpu.end_copy(copy.unit.name)
        copy.queued = True
        if copy.is_read:
            assert self._reader is not None, "it came from there"
            self._reader.release(copy.unit.name, copy.copied)
