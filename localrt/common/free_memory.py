"""Hands memory that was freed back to the system.

glibc keeps what a burst of work has freed, several megabytes after a vocabulary was read, and under
a memory limit each of them is missing elsewhere. Other C libraries return it by themselves, or have
no way to be asked.
"""

from __future__ import annotations

import ctypes
import sys


def return_free_memory() -> None:
    """Ask the C library for it, which takes milliseconds; without such a call nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
