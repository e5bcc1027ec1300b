"""Where a ring's units come from: files on the SSD, or RAM for a ring in a GPU's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.offload.accelerator import Accelerator
from localrt.offload.clock import Clock
from localrt.offload.files import FileReader
from localrt.offload.ring import Mark
from localrt.offload.unit_reader import UnitReader

__all__ = ["DiskSource", "LinkSource"]

Bytes = npt.NDArray[np.uint8]


class DiskSource:
    """Units in ``files``. See ``Source``."""

    def __init__(self, files: FileReader, clock: Clock) -> None:
        self._files = files
        self._clock = clock

    def fetch(self, unit: StoredUnit, start: int, out: Bytes, after: Mark) -> Mark:
        """Read now: the bytes are free already, ``after`` is when on the clock."""
        started = self._clock.begin("ssd")
        try:
            self._files.read_into(unit.file, unit.offset + start, out)
        finally:
            mark = self._clock.end("ssd", unit.name, started, after=after)
        return mark


@dataclass(slots=True)
class _Passing:
    """A unit of the reader's ring that is being copied."""

    data: Bytes
    there: Mark
    left: int  # bytes to copy
    active: int = 0  # threads at it
    abandoned: bool = False


class LinkSource:
    """Units in RAM: those of ``resident``, others through ``reader``'s ring. See ``Source``.

    A unit's place in the reader's ring is given back when all of it has been copied. ``verify`` is
    called for every unit that is read.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        resident: Mapping[str, Bytes],
        reader: UnitReader | None,
        verify: Callable[[StoredUnit, Bytes], None],
    ) -> None:
        self._accelerator = accelerator
        self._verify = verify
        self._resident = resident
        self._reader = reader
        self._lock = threading.Lock()
        self._passing: dict[str, _Passing] = {}
        self._round = 0

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Mark) -> Mark:
        """Copy over the link; waits until the source may be changed."""
        stop = start + len(out)
        data = self._resident.get(unit.name)
        if data is not None:
            return self._accelerator.copy_in(unit.name, data[start:stop], out, after, None)
        passing = self._take(unit)
        mark: Mark = None
        copied = 0
        try:
            piece = passing.data[start:stop]
            mark = self._accelerator.copy_in(unit.name, piece, out, after, passing.there)
            copied = len(piece)
        finally:
            with self._lock:
                passing.active -= 1
                passing.left -= copied
                if not passing.active and (passing.left <= 0 or passing.abandoned):
                    self._give_back(unit.name, passing, mark)
        return mark

    def forget(self) -> None:
        """The pass was abandoned: nothing is waited for, units copied in part are given back."""
        self._round += 1
        with self._lock:
            for name, passing in list(self._passing.items()):
                passing.abandoned = True
                if not passing.active:
                    self._give_back(name, passing, None)

    def _take(self, unit: StoredUnit) -> _Passing:
        assert self._reader is not None, "units that are not resident are read"
        this_round = self._round

        def check() -> None:
            if self._round != this_round:
                raise CheckpointError(f"reading {unit.name} was given up")

        with self._lock:
            passing = self._passing.get(unit.name)
            if passing is None:
                data, there = self._reader.acquire(unit.name, check)
                try:
                    self._verify(unit, data)
                except BaseException:
                    self._reader.release(unit.name)
                    raise
                passing = self._passing[unit.name] = _Passing(data, there, unit.nbytes)
            passing.active += 1
            return passing

    def _give_back(self, name: str, passing: _Passing, mark: Mark) -> None:
        assert self._reader is not None, "it came from there"
        if self._passing.get(name) is passing:
            del self._passing[name]
        self._reader.release(name, mark)
