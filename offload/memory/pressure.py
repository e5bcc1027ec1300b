"""Whether other programs need memory that this one could give back: asked for now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from localrt.offload.memory.state import memory_state

_INTERVAL_S = 0.5
# Below this the system begins to swap, and to drop the pages of programs at work.
_LEAST_FREE = 256 << 20
_LEAST_FREE_LIMITED = 2 << 20  # within a cgroup, whose limit is ours alone
_STEP = 8 << 20  # not to come back for every megabyte
_LEAST_FREE_VRAM = 150 << 20


class MemoryPressure:
    """Called before passes; returns bytes of RAM and of the card's memory that are needed now."""

    def __init__(self, free_vram: Callable[[], int | None]) -> None:
        self._free_vram = free_vram
        self._asked = time.monotonic()

    def __call__(self) -> tuple[int, int]:
        """(RAM, VRAM) in bytes; below zero what may be taken again."""
        now = time.monotonic()
        if now - self._asked < _INTERVAL_S:
            return 0, 0
        self._asked = now
        state = memory_state()
        least = _LEAST_FREE if state.limit is None else _LEAST_FREE_LIMITED
        free = self._free_vram()
        vram = 0 if free is None else _needed(free, _LEAST_FREE_VRAM)
        return _needed(state.available, least), vram


def _needed(free: int, least: int) -> int:
    if free < least:
        return _rounded(least - free)
    # Half of what is free beyond a good reserve may be taken again.
    return min(0, 2 * least + _STEP - free) // 2


def _rounded(nbytes: int) -> int:
    return 0 if nbytes <= 0 else -(-nbytes // _STEP) * _STEP
