"""Threads that keep the next units of a pass in a ring, in a fixed cyclic order.

The order wraps round the end of the model into the next token, so that the disk does not rest
between tokens; it rests only when the ring is full. Every unit has its own state to wait for: there
is no barrier. The same code reads from the SSD into RAM and copies from RAM to a GPU; the two
sources are at the end of the file.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.weight_store import Check
from localrt.offload.device.gpu import Clock, Event, Gpu
from localrt.offload.reading import reader
from localrt.offload.reading.files import StoreFiles
from localrt.offload.ring import Lease, Ring
from localrt.quant.formats.packed import Bytes


@dataclass(slots=True, eq=False, kw_only=True)
class _Load(reader.Load):
    """A unit in the ring or on its way there."""

    lease: Lease
    unwanted: bool = False
    used: bool = False  # acquired and not released


class UnitReader(reader.Reader):
    """See ``Reader``. Units go into ``ring``.

    ``drained`` is called when all that was dropped has ended, before anything else is fetched.
    """

    def __init__(
        self,
        source: reader.Source,
        ring: Ring,
        *,
        threads: int,
        stall_s: float = 60.0,
        drained: Callable[[], None] = lambda: None,
    ) -> None:
        self._ring = ring
        self._drained = drained
        self._order: tuple[StoredUnit, ...] = ()
        self._cursor = 0  # of the unit that is leased next
        self._skips: Counter[str] = Counter()  # times that a unit is left out
        self._loads: deque[_Load] = deque()  # oldest first
        self._draining = False  # loads are dropped once nothing of them is in flight
        self._stopped = False  # and nothing is begun after that
        self._following: tuple[StoredUnit, ...] | None = None  # the order to take up after that
        self._new_ring: Ring | None = None  # and the ring
        super().__init__(source, threads=threads, stall_s=stall_s, name="reader")

    @property
    def room(self) -> int:
        """Bytes of the ring."""
        return self._ring.nbytes

    @property
    def failed(self) -> bool:
        """Whether a unit that nobody has asked for yet could not be fetched."""
        with self._changed:
            return any(load.error is not None for load in self._loads)

    def stop(self) -> None:
        """Drop what was fetched, and begin nothing until ``schedule`` or ``rewind``."""
        with self._changed:
            self._stopped = True
            self._drop()

    def schedule(self, units: Sequence[StoredUnit], ring: Ring | None = None) -> None:
        """Fetch ``units`` from now on, again and again, from the first; drop what was fetched.

        ``ring`` takes the place of the one so far.
        """
        with self._changed:
            self._following = tuple(units)
            self._new_ring = ring or self._new_ring
            self._stopped = False
            self._drop()

    def rewind(self) -> None:
        """Begin again with the first unit, since the pass was abandoned."""
        with self._changed:
            self._stopped = False
            self._drop()

    def skip(self, names: Iterable[str], *, finish: bool = False) -> None:
        """Leave each of these units out once: the pass does not want them.

        Every pass acquires or skips each unit of the order, so that a unit which is there already
        is the one of this pass, however many rounds the ring holds. With ``finish`` what is on its
        way is fetched to its end, since the source gives it once.
        """
        with self._changed:
            order = self._order if self._following is None else self._following
            for name in {unit.name for unit in order}.intersection(names):
                load = None if self._draining else self._oldest(name)
                if load is None:
                    self._skips[name] += 1
                else:
                    load.unwanted = True
                    if not finish:
                        load.waiting.clear()
            self._sweep()
            self._changed.notify_all()

    def acquire(self, name: str, check: Check | None = None) -> Any:
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

    def release(self, name: str, event: Event | None = None) -> None:
        """Give the memory of ``name`` to the units that follow, once ``event`` has happened."""
        with self._changed:
            for load in self._loads:
                if load.unit.name == name and load.used:
                    load.used = False
                    self._free(load, event)
                    self._finish_draining()
                    return

    # -- under the lock --------------------------------------------------------------------------

    def _take(self, name: str) -> Any | None:
        """The unit if it has arrived; it is in use from then on."""
        if self._draining:
            return None
        load = self._oldest(name)
        if load is None:
            if not any(unit.name == name for unit in self._order):
                raise ValueError(f"unit {name} is not among those that are read in each pass")
            return None
        if load.error is not None:
            raise load.error
        if load.missing:
            return None
        load.used = True
        return load.memory

    def _oldest(self, name: str) -> _Load | None:
        """The oldest load of ``name`` that no pass has taken or skipped."""
        for load in self._loads:
            if load.unit.name == name and not load.unwanted and not load.used:
                return load
        return None

    def _free(self, load: _Load, event: Event | None = None) -> None:
        self._loads.remove(load)
        self._ring.release(load.lease, event)
        self._changed.notify_all()

    def _sweep(self) -> None:
        """Free what nobody wants, as far as it has arrived."""
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
        if not self._draining or self._stopped:
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
        self._drained()
        self._changed.notify_all()

    def _next(self) -> reader.Job | None:
        if self._draining or not self._order:
            return None
        last = self._loads[-1] if self._loads else None
        if last is None or not last.waiting:
            while True:
                unit = self._order[self._cursor]
                if any(load.unit is unit and not load.done for load in self._loads):
                    return None  # a source gives a unit once before it gives it again
                if not self._skips[unit.name]:
                    break
                self._skips[unit.name] -= 1
                self._source.skip(unit)
                self._advance()
            lease = self._ring.lease(unit.nbytes)
            if lease is None:
                return None
            memory = self._ring.view(lease)
            last = _Load(unit=unit, memory=memory, waiting=lease.waiting, lease=lease)
            self._loads.append(last)
            self._advance()
        found = self._ring.next_chunk(last.lease)
        if found is None:
            return None
        last.in_flight += 1
        return last, *found

    def _advance(self) -> None:
        self._cursor = (self._cursor + 1) % len(self._order)

    def _arrived(self, load: reader.Load) -> None:
        assert isinstance(load, _Load), "it is in the ring"
        self._finish_draining()
        if load.unwanted:
            self._sweep()
        if load.done or load.error is not None or self._draining:
            self._changed.notify_all()


class DiskSource:
    """Units in ``files``. See ``Source``."""

    def __init__(self, files: StoreFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock

    def fetch(self, unit: StoredUnit, start: int, out: Bytes, after: Event | None) -> None:
        """Read now: RAM is free at once, no GPU works on it."""
        started = self._clock.begin("ssd")
        try:
            self._files.read_into(unit.file, unit.offset + start, out)
        finally:
            self._clock.end("ssd", unit.name, started)

    def skip(self, unit: StoredUnit) -> None:
        """Nothing to do: a file gives what it is asked for."""


@dataclass(slots=True, eq=False)
class _Passing:
    """A unit of the reader's ring that is being copied; ``data`` is None until it is there."""

    unit: StoredUnit
    unasked: int  # bytes that no thread has taken on
    data: Bytes | None = None
    error: BaseException | None = None
    active: int = 0  # threads at it
    given_up: bool = False


class LinkSource:
    """Units whose bytes ``resident`` gives, and others through ``reader``'s ring. See ``Source``.

    A unit's place in the reader's ring is given back when all of it has been copied. ``verify`` is
    called for every unit that is read. A unit is asked for again only when all of it has been
    copied. No lock is held while a unit is waited for: another may have
    to be given back before it can be read.
    """

    def __init__(
        self,
        gpu: Gpu,
        resident: Callable[[str], Bytes | None],
        reader: UnitReader | None,
        verify: Callable[[StoredUnit, Bytes], None],
    ) -> None:
        self._gpu = gpu
        self._verify = verify
        self._resident = resident
        self._reader = reader
        self._changed = threading.Condition()
        self._passing: dict[str, _Passing] = {}
        self._from_ram = 0  # copies on their way of units that are resident
        self._stopped = False

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Event | None) -> None:
        """Copy over the link."""
        stop = start + len(out)
        with self._changed:
            self._check()
            data = self._resident(unit.name)
            self._from_ram += data is not None
        if data is not None:
            try:
                self._gpu.copy_in(unit.name, data[start:stop], out, after)
                return
            finally:
                with self._changed:
                    self._from_ram -= 1
                    self._changed.notify_all()
        passing, first = self._enter(unit, len(out))
        try:
            if first:
                self._acquire(passing)
            self._gpu.copy_in(unit.name, self._await(passing)[start:stop], out, after)
        finally:
            self._leave(passing)

    def skip(self, unit: StoredUnit) -> None:
        """The reader leaves it out as well: it brings a unit once for each time it is copied."""
        if self._resident(unit.name) is None and not self._stopped:
            assert self._reader is not None, "units that are not resident are read"
            self._reader.skip([unit.name])

    def forget(self) -> None:
        """Nobody wants what is on its way: waiting ends, units copied in part are given back.

        Until ``resume`` nothing is asked of the reader, and nothing resident is copied: its RAM
        may be freed.
        """
        with self._changed:
            self._stopped = True
            for passing in list(self._passing.values()):
                passing.given_up = True
                self._release(passing)
            self._changed.notify_all()
            while self._from_ram:
                self._changed.wait()

    def resume(self) -> None:
        """All fetches from before ``forget`` have ended."""
        with self._changed:
            self._stopped = False

    def _enter(self, unit: StoredUnit, nbytes: int) -> tuple[_Passing, bool]:
        """Take on ``nbytes`` of a unit; True to the first, who gets it from the reader."""
        with self._changed:
            self._check()
            passing = self._passing.get(unit.name)
            first = passing is None
            if passing is None:
                passing = self._passing[unit.name] = _Passing(unit, unit.nbytes)
            passing.unasked -= nbytes
            passing.active += 1
            return passing, first

    def _acquire(self, passing: _Passing) -> None:
        assert self._reader is not None, "units that are not resident are read"
        unit = passing.unit
        try:
            data = self._reader.acquire(unit.name, self._check)
            try:
                self._verify(unit, data)
            except BaseException:
                self._reader.release(unit.name)
                raise
        except BaseException as error:
            with self._changed:
                passing.error = error
                self._changed.notify_all()
            raise
        with self._changed:
            passing.data = data
            self._changed.notify_all()

    def _await(self, passing: _Passing) -> Bytes:
        with self._changed:
            while passing.data is None:
                if passing.error is not None:
                    raise passing.error
                self._check()
                self._changed.wait()
            return passing.data

    def _check(self) -> None:
        if self._stopped:
            raise CheckpointError("copying was given up")

    def _leave(self, passing: _Passing) -> None:
        with self._changed:
            passing.active -= 1
            self._release(passing)

    def _release(self, passing: _Passing) -> None:
        """A unit of which nothing more is copied."""
        if passing.active or (passing.unasked and not passing.given_up):
            return
        del self._passing[passing.unit.name]
        if passing.data is not None:
            assert self._reader is not None, "it came from there"
            self._reader.release(passing.unit.name)
