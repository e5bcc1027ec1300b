"""Where the lines of an answer end it: one that is indented too little, or the first one too late.

For editors, which want the rest of a block and not the next function. It knows text only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LineLimit", "LineMatcher"]

# A line's end, blank lines, and the white space that the next line begins with.
_LINE = re.compile(r"\n(?:[ \t\r]*\n)*([ \t]*)(?=\S)")


@dataclass(frozen=True, slots=True)
class LineLimit:
    """An answer ends before a line that begins with fewer than ``indent`` spaces and tabs, and
    after ``seconds`` with the line that it is in. The line that it begins in has any indentation.
    """

    indent: int = 0
    seconds: float | None = None


class LineMatcher:
    """Feeds on text pieces; tells what may be shown. ``stopped`` says that nothing follows."""

    def __init__(self, limit: LineLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._began: float | None = None
        self._held = ""  # a line's end, and what may be the next line's indentation
        self.stopped = False

    def push(self, piece: str) -> str:
        """Text of the answer for certain."""
        if self.stopped:
            return ""
        now = self._clock()
        self._began = now if self._began is None else self._began
        text = self._held + piece
        late = self._limit.seconds is not None and now - self._began > self._limit.seconds
        # Space alone decides nothing; looking through all of it each time would take its square.
        for line in _LINE.finditer(text) if piece.strip() else ():
            if late or len(line[1]) < self._limit.indent:
                return self._stop(text[: line.start()])
        end = text.find("\n", max(0, len(text.rstrip())))
        if end < 0:
            self._held = ""
            return text
        if late:
            return self._stop(text[:end])
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """What was held back when the answer ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _stop(self, shown: str) -> str:
        self.stopped, self._held = True, ""
        return shown
