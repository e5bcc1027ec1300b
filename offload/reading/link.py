"""Copies units over the link from RAM to a GPU: units that stay in RAM, and units that the CPU's
ring reads from the SSD. A ``UnitReader`` with this source fills the GPU's ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Event, Gpu
from localrt.offload.reading.reader import UnitReader
from localrt.quant.formats.packed import Bytes


@dataclass(slots=True, eq=False)
class _Passing:
    """A unit of the reader's ring that is being copied; ``data`` is None until it is there."""

    unit: StoredUnit
    unasked: int  # bytes that no thread has begun to copy
    data: Bytes | None = None
    error: BaseException | None = None
    active: int = 0  # threads that copy it
    given_up: bool = False


class LinkSource:
    """A source of units: resident ones from ``resident``, others through ``reader``'s ring.

    See ``reader.Source``. A unit's place in the reader's ring is given back when all of it has been
    copied; before that it is not asked for again. ``verify`` is called for every unit that is read.
    Waiting for a unit holds no lock: another unit may have to be released before it can be read.
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
        self._from_ram = 0  # running copies of resident units
        self._stopped = False

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Event | None) -> None:
        """Copy bytes of ``unit`` over the link."""
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
        """Have the reader skip it too: it reads a unit once for each time it is copied."""
        if self._resident(unit.name) is None and not self._stopped:
            assert self._reader is not None, "units that are not resident are read"
            self._reader.skip([unit.name])

    def forget(self) -> None:
        """Drop what is being copied: end all waiting, release units that are partly copied.

        Until ``resume`` nothing is read or copied, so the RAM of resident units may be freed.
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
        """Copy again. All fetches from before ``forget`` must have ended."""
        with self._changed:
            self._stopped = False

    def _enter(self, unit: StoredUnit, nbytes: int) -> tuple[_Passing, bool]:
        """Register a copy of ``nbytes``; True for the unit's first, which must acquire it."""
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
        """Release the unit in the reader's ring once nothing more of it is to be copied."""
        if passing.active or (passing.unasked and not passing.given_up):
            return
        del self._passing[passing.unit.name]
        if passing.data is not None:
            assert self._reader is not None, "it came from there"
            self._reader.release(passing.unit.name)
