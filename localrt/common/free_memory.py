"""Returns freed memory to the system.

glibc keeps freed memory (several megabytes after reading a vocabulary), which counts towards a
memory limit. Other C libraries return it by themselves, or have no function for it.
"""

from __future__ import annotations

import ctypes
import sys


def return_free_memory() -> None:
    """Ask glibc to return freed memory, which takes milliseconds; elsewhere does nothing."""
    if not sys.platform.startswith("linux"):
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
