"""The files of a store: reads byte ranges into existing memory.

Direct reads bypass the page cache. Where a file system refuses them or buffered reads are faster,
the pages read are dropped, so that a memory budget holds. This module knows byte ranges, not units.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localrt import system
from localrt.common.errors import CheckpointError, disk_errors, reason_of
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Clock, Event
from localrt.quant.formats.packed import Bytes

_LOOKS, _BETWEEN_LOOKS_S = 10, 0.05  # at a file that seems to have changed


@dataclass(frozen=True, slots=True)
class ReadMode:
    """How to read a disk: see ``disk_speed``. ``block`` is the bytes of one request."""

    direct: bool = False
    threads: int = 2
    block: int = 2 << 20


class StoreFiles:
    """The named files of a folder. Used by several threads at once.

    Raises:
        CheckpointError: a file cannot be opened.
    """

    def __init__(self, folder: Path, names: Iterable[str], *, direct: bool = False) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptors: dict[str, tuple[int, bool]] = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        try:
            for name in dict.fromkeys(names):
                self._descriptors[name] = system.open_file(folder / name, direct=direct)
                self._stamps[name] = self._stamp(name)
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"{error.filename or folder} cannot be read: {reason_of(error)}"
            ) from error

    def read_into(self, name: str, offset: int, out: Bytes) -> None:
        """Fill ``out`` from byte ``offset`` of file ``name``.

        Raises:
            CheckpointError: the file is shorter, or cannot be read.
        """
        view = out.data
        done = 0
        while done < len(view):
            descriptor, direct = self._descriptors[name]
            try:
                try:
                    got = system.read_at(descriptor, view[done:], offset + done)
                except OSError:
                    if not direct:
                        raise
                    # An odd remainder, or a file system that refuses the direct read itself.
                    self._use_cache(name)
                    continue
            except OSError as error:
                path, why = self._folder / name, reason_of(error)
                raise CheckpointError(f"{path} cannot be read: {why}") from error
            if got == 0:
                raise CheckpointError(
                    f"{self._folder / name} was cut short while it was in use: copy or quantize "
                    "the model again"
                )
            done += got
        if not self._descriptors[name][1]:
            system.drop_cached(self._descriptors[name][0], offset, len(view))

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file's size or modification time has changed; StorageError if
        the disk does not say.
        """
        for name, stamp in self._stamps.items():
            with disk_errors(self._folder / name):
                now = self._stamp(name)
                # Mending a unit writes to its file, and then gives back its time.
                for _ in range(_LOOKS):
                    if now == stamp:
                        break
                    time.sleep(_BETWEEN_LOOKS_S)
                    now = self._stamp(name)
            if now != stamp:
                raise CheckpointError(
                    f"{self._folder / name} was changed while it was in use: load the model again"
                )

    def close(self) -> None:
        """Close all files; closing twice is fine."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1][0])

    def __del__(self) -> None:
        self.close()

    def _use_cache(self, name: str) -> None:
        with self._lock:
            old, direct = self._descriptors[name]
            if direct:
                self._descriptors[name] = system.open_file(self._folder / name)
                # The old one stays open until close: another thread may be reading through it.
                self._descriptors[f"{name} (direct)"] = (old, False)

    def _stamp(self, name: str) -> tuple[int, int]:
        status = os.fstat(self._descriptors[name][0])
        return status.st_size, status.st_mtime_ns


class DiskSource:
    """Units in ``files``. See ``reader.Source``."""

    def __init__(self, files: StoreFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock

    def fetch(self, unit: StoredUnit, start: int, out: Bytes, after: Event | None) -> None:
        """Read, once copies to a GPU from this RAM have ended."""
        if after is not None:
            after.synchronize()
        started = self._clock.begin("ssd")
        try:
            self._files.read_into(unit.file, unit.offset + start, out)
        finally:
            self._clock.end("ssd", unit.name, started)
