"""Memory straight from the system: page-aligned for reads and pinning, given back when freed."""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt

__all__ = ["aligned_buffer", "large_floats"]

_LARGE_PAGE = 1 << 21
_LARGE_ARRAY = 1 << 20


def aligned_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """``nbytes`` of zeros at a page boundary, resident only once touched, in large pages if any.

    The memory goes back to the system when the last view of it is gone.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    if hasattr(mmap, "MAP_PRIVATE"):
        # Shared memory, the default, would count as page cache, and have small pages.
        region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        region = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= _LARGE_PAGE:
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return np.frombuffer(region, np.uint8)


def large_floats(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """An array whose values are not set; one of megabytes goes back to the system when it is freed.

    The C library would keep it: beneath a memory budget each megabyte is missing elsewhere.
    """
    nbytes = 4 * math.prod(shape)
    if nbytes < _LARGE_ARRAY:
        return np.empty(shape, np.float32)
    return aligned_buffer(nbytes).view(np.float32).reshape(shape)
