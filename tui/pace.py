"""How often the screen may show new text: 20 times a second at most, at a small share of a core.

The engine computes on the same machine. When drawing gets dear (a slow terminal, a huge paragraph),
the app draws less often instead of slowing the model. Knows two clocks and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["FRAME_SECONDS", "Pace"]

FRAME_SECONDS = 0.05
_SHARE = 0.05  # of one core, for drawing
_LONGEST = 0.5  # seconds between two drawings, whatever they cost


class Pace:
    """``due`` says whether the next drawing may happen now, and if so counts it as begun."""

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._wall = wall
        self._cpu = cpu
        self._began = wall() - _LONGEST
        self._spent = cpu()

    def due(self) -> bool:
        """Whether the pause since the last drawing is long enough for what that one cost."""
        now, spent = self._wall(), self._cpu()
        pause = min((spent - self._spent) / _SHARE, _LONGEST)
        if now - self._began < pause:
            return False
        self._began, self._spent = now, spent
        return True
