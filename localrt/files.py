"""Files that are replaced whole or not at all: a reader, or a crash, never meets half of one.

The bytes go to another file in the same folder, are synced to the disk and renamed. Writers at the
same time do not disturb each other: the last one wins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from localrt.errors import StorageError

__all__ = ["atomic_write", "write_bytes", "write_text"]

_MODE = 0o666  # what ``open`` gives, less the umask
_NAME_CHARACTERS = 40  # file systems take 255 bytes


@contextmanager
def atomic_write(
    path: Path, *, mode: int = _MODE, sync: bool = True, aside: Path | None = None
) -> Iterator[BinaryIO]:
    """A stream whose bytes become the file ``path`` at the end of the block, unless it raises.

    Args:
        path: the file to write or replace.
        mode: its permissions, less the umask.
        sync: wait for the disk, so that a power cut leaves the old or the new file; False for what
            can be computed again.
        aside: where the bytes go first, in the same folder; by default a name of this thread's own.

    Raises:
        OSError: the file cannot be written; what was there stays.
    """
    if aside is None:
        writer = f"{os.getpid()}-{threading.get_ident()}"
        aside = path.with_name(f".{path.name[:_NAME_CHARACTERS]}.{writer}.tmp")
    aside.unlink(missing_ok=True)
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            yield stream
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_bytes(
    path: Path, data: bytes, *, mode: int = _MODE, sync: bool = True, folder: bool = False
) -> None:
    """Write or replace a file; ``folder``: make the one it lies in. Else as ``atomic_write``.

    Raises:
        StorageError: the file cannot be written; what was there stays.
    """
    try:
        if folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, mode=mode, sync=sync) as stream:
            stream.write(data)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def write_text(
    path: Path, text: str, *, mode: int = _MODE, sync: bool = True, folder: bool = False
) -> None:
    """``write_bytes`` in UTF-8. Lone surrogates, which a model's text may hold, are kept.

    Raises:
        StorageError: the file cannot be written; what was there stays.
    """
    write_bytes(path, text.encode("utf-8", "surrogatepass"), mode=mode, sync=sync, folder=folder)
