"""Hands memory that was freed back to the system.

glibc keeps memory that a burst of work has freed (several megabytes after reading a vocabulary),
which is then missing elsewhere under a memory limit. Other C libraries return it by themselves, or
cannot be asked.
"""

from __future__ import annotations

import ctypes
import sys


def return_free_memory() -> None:
    """Ask the C library to return it, which takes milliseconds; does nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
