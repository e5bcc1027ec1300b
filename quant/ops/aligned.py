"""Page-aligned memory: for direct reads from a disk, and for pinning."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

__all__ = ["aligned_buffer"]

_LARGE_PAGE = 1 << 21


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
