"""What ends an answer, or its thinking, beside stop strings.

``LineMatcher``, for editors: a line that is indented too little, or the first line after a time
limit. ``Thinking``: how long a model thinks, and the tokens that end it where a limit is reached.
A parser tells whether the text is within thinking.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """At most ``tokens`` of thinking. ``closes`` are the tokens that then end it: the first time,
    and, by the last of them, whenever it begins again. ``then`` follows what a model ends itself.
    """

    tokens: int | None
    closes: tuple[tuple[int, ...], ...]
    then: tuple[int, ...] = ()


class Thinking:
    """Of one answer: ``tokens`` are those that the model has thought, ``inside`` whether it does
    so now.
    """

    def __init__(self, limit: ThinkingLimit | None, *, inside: bool) -> None:
        self.tokens = 0
        self.inside = inside
        self._limit = limit
        self._closed = 0
        self._forced: list[int] = []  # the next ones, in order

    @property
    def free(self) -> bool:
        """Whether what comes next is thinking, or forced: no part of the answer itself."""
        return self.inside or bool(self._forced)

    @property
    def can_close(self) -> bool:
        """Whether it is known how the thinking of now is ended."""
        return self.inside and self._limit is not None

    def close(self) -> int | None:
        """The first of the tokens that end the thinking of now, which the others follow."""
        limit = self._limit
        assert limit is not None, "it can be closed"
        self._forced = list(limit.closes[min(self._closed, len(limit.closes) - 1)])
        self._closed += 1
        return self.take()

    def take(self) -> int | None:
        """The token that must come next, if there is one."""
        return self._forced.pop(0) if self._forced else None

    def follow(self, inside: bool, *, forced: bool) -> None:
        """A token has been chosen, or ``forced``; the text now ends ``inside`` or not."""
        was, self.inside = self.inside, inside
        if inside and was and not forced:
            self.tokens += 1
        limit = self._limit
        if limit is None or self._forced:
            return
        if was and not inside and not forced:
            self._forced = list(limit.then)
        elif inside and limit.tokens is not None and self.tokens >= limit.tokens:
            self._forced = list(limit.closes[min(self._closed, len(limit.closes) - 1)])
            self._closed += 1

    def ahead(self, left: int) -> int:
        """Of ``left`` tokens to come, those worth drafting and the one after them.

        What is forced is not drafted.
        """
        if self._forced:
            return min(left, 1)
        if self._limit is None or self._limit.tokens is None or not self.inside:
            return left
        return min(left, self._limit.tokens - self.tokens + 1)
