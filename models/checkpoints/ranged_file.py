"""A file read by explicit ranges, from any thread, into memory that the caller owns.

Reads go through ``pread`` and not through a memory map: mapped pages count as the process's memory
and are evicted when they are about to be needed. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError

_MOST_PER_CALL = 1 << 30  # systems refuse, or silently shorten, single reads of 2 GiB and more


class RangedFile:
    """An open file of known size, closed at the latest when it is forgotten.

    Threads may read at the same time, but must have finished when it is closed.

    Raises:
        CheckpointError: the file cannot be opened, or is a folder or another special file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            if not path.is_file():
                kind = "is not a regular file" if path.exists() else "does not exist"
                raise CheckpointError(f"{path} {kind}")
            self._file = path.open("rb", buffering=0)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def read(self, offset: int, count: int) -> npt.NDArray[np.uint8]:
        """``count`` bytes from ``offset``, as a new array.

        Raises:
            CheckpointError: the file ends before, cannot be read, or is closed.
        """
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: bytes {offset} to {offset + count} are wanted, "
                f"the file has {self.size}"
            )
        data = np.empty(count, np.uint8)
        view = data.data
        done = 0
        while done < count:
            try:
                got = self._read_into(view[done : done + _MOST_PER_CALL], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read: {error.strerror or error}"
                ) from error
            if got == 0:
                raise CheckpointError(f"{self.path} was cut short while it was being read")
            done += got
        return data

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # opening may have failed
            self._file.close()

    def _read_into(self, view: memoryview, offset: int) -> int:
        if self._file.closed:
            raise CheckpointError(f"{self.path} is closed")
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        with self._lock:  # no positioned reads on this system
            self._file.seek(offset)
            return self._file.readinto(view) or 0


def describe_start(file: RangedFile) -> str:
    """What a file that is not what it should be seems to be, for an error message."""
    if file.size == 0:
        return "it is empty"
    start = file.read(0, min(file.size, 16)).tobytes()
    if start.startswith(b"version https://"):
        return "it is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "it is a web page: the download went wrong"
    return f"it begins with {start[:4]!r}"
