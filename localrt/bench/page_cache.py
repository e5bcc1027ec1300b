"""Drop what the operating system keeps of files, so that the next reader reads the disk.

A memory limit counts the page cache that a process causes; what another one left behind would be
free for it. The model's files are dropped everywhere that allows it, the whole cache where this
process may do that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["drop_from_cache", "model_files"]

_DROP_ALL = Path("/proc/sys/vm/drop_caches")


def model_files(path: Path) -> list[Path]:
    """The files of a model: those of its folder and below, or all parts of a split GGUF."""
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file()]
    stem, separator, rest = path.name.partition("-00001-of-")
    return sorted(path.parent.glob(f"{stem}-*-of-{rest}")) if separator else [path]


def drop_from_cache(paths: Iterable[Path], *, drop_all: Path = _DROP_ALL) -> str:
    """Drop the pages of models' files, and all clean pages of the machine where permitted.

    Returns what was dropped, in words: ``"everything"``, ``"model files"`` or ``"nothing"``.
    """
    dropped = "nothing"
    for file in _each(paths):
        if hasattr(os, "posix_fadvise"):
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError:
                continue
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
            dropped = "model files"
    try:
        drop_all.write_text("1\n", encoding="ascii")
    except OSError:  # not root, or not Linux
        return dropped
    return "everything"


def _each(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from model_files(path)
