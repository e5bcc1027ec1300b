"""How often the screen may show new text: 20 times a second, at 1 % of the processor.

The engine computes on the same machine. When drawing gets dear (a slow terminal, a huge paragraph),
the app draws less often instead of slowing the model. Knows two clocks and nothing else.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

__all__ = ["FRAME_SECONDS", "Pace", "spare_collector"]

FRAME_SECONDS = 0.05
_SHARE = 0.01  # of the processor, for drawing: decoding waits for that and as much again
_CORES = 8  # at most, that are counted: drawing needs no more
_LONGEST = 0.5  # seconds between two drawings, whatever they cost


def spare_collector() -> None:
    """Take what is imported by now out of garbage collection: it stays as long as the process, and
    looking through it stops everything for a tenth of a second at a time.
    """
    gc.collect()
    gc.freeze()


class Pace:
    """``due`` says whether the next drawing may happen now, and if so counts it as begun."""

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
        *,
        cores: int | None = None,
    ) -> None:
        self._share = _SHARE * min(cores or os.cpu_count() or 1, _CORES)  # of one core
        self._wall = wall
        self._cpu = cpu
        self._began = wall() - _LONGEST
        self._spent = cpu()

    def due(self) -> bool:
        """Whether the pause since the last drawing is long enough for what that one cost."""
        now, spent = self._wall(), self._cpu()
        pause = min((spent - self._spent) / self._share, _LONGEST)
        if now - self._began < pause:
            return False
        self._began, self._spent = now, spent
        return True
