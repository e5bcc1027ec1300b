"""Files and the page cache: drop what is kept of them, and count what is read from the disk.

A memory limit counts the page cache that a process causes; what another one left behind would be
free for it. The model's files are dropped everywhere that allows it, the whole cache where this
process may do that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = ["disk_bytes_read", "drop_from_cache", "model_files"]

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
    if hasattr(os, "posix_fadvise"):
        for file in (file for path in paths for file in model_files(path)):
            try:
                with file.open("rb", buffering=0) as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:
                continue
            dropped = "model files"
    try:
        drop_all.write_text("1\n", encoding="ascii")
    except OSError:  # not root, or not Linux
        return dropped
    return "everything"


def disk_bytes_read() -> int | None:
    """Bytes that this process has had read from storage; None where not known.

    By the kernel's account: page faults on mapped files, buffered and direct reads count, what the
    page cache already holds does not. So every engine's reading is measured alike.
    """
    if sys.platform != "linux":
        return None
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, OSError, psutil.Error):  # a kernel without task accounting
        return None
