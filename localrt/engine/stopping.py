"""What ends an answer or its thinking, besides stop strings.

``LineMatcher``, for editors, stops at a line with too little indentation, or at the end of a line
after a time limit. ``ThinkingState`` counts how long a model thinks, and knows the tokens that end
it at a limit. A parser tells whether the text is within thinking. ``Repetition`` sees a text that
repeats itself without end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

# A line's end, blank lines, and the indentation of the next line.
_LINE = re.compile(r"\n(?:[ \t\r]*\n)*([ \t]*)(?=\S)")


@dataclass(frozen=True, slots=True)
class LineLimit:
    """End an answer before a line that begins with fewer than ``indent`` spaces and tabs, and at
    the end of its line after ``seconds``. The answer's first line may have any indentation.
    """

    indent: int = 0
    seconds: float | None = None


class LineMatcher:
    """Takes pieces of text and returns what may be shown. ``stopped``: nothing follows."""

    def __init__(self, limit: LineLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._began: float | None = None
        self._held = ""  # a line's end, and what may be the next line's indentation
        self.stopped = False

    def push(self, piece: str) -> str:
        """Return the text that is certain to be in the answer."""
        if self.stopped:
            return ""
        now = self._clock()
        self._began = now if self._began is None else self._began
        text = self._held + piece
        late = self._limit.seconds is not None and now - self._began > self._limit.seconds
        # White space decides nothing; searching it each time would take quadratic time.
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
        """Return the text held back, when the answer ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _stop(self, shown: str) -> str:
        self.stopped, self._held = True, ""
        return shown


class Repetition:
    """Tells whether a text has come to repeat one piece, eight times or more, without anything
    between.
    """

    _LENGTH, _TIMES = 1200, 8  # characters that repeat, and how often their piece is in them
    _EVERY = 64  # characters from one look to the next

    def __init__(self) -> None:
        self._tail = ""
        self._unseen = 0

    def push(self, text: str) -> bool:
        """Add ``text``; return whether the text ends in such a repetition."""
        self._tail = (self._tail + text)[-self._LENGTH :]
        self._unseen += len(text)
        if len(self._tail) < self._LENGTH or self._unseen < self._EVERY:
            return False
        self._unseen = 0
        pieces = range(1, self._LENGTH // self._TIMES + 1)
        return any(self._tail[size:] == self._tail[:-size] for size in pieces)


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """Limit thinking to ``tokens``. At the limit the first of ``closes`` ends it; when thinking
    resumes, the next ones do, then always the last. ``then`` follows thinking that the model ends
    itself.
    """

    tokens: int | None
    closes: tuple[tuple[int, ...], ...]
    then: tuple[int, ...] = ()


class ThinkingState:
    """The thinking of one answer: ``tokens`` counts its tokens, ``inside`` says whether the model
    thinks now.
    """

    def __init__(self, limit: ThinkingLimit | None, *, inside: bool) -> None:
        self.tokens = 0
        self.inside = inside
        self._limit = limit
        self._closed = 0
        self._forced: list[int] = []  # the next tokens, in order

    @property
    def free(self) -> bool:
        """Whether the next token is thinking or forced, so not part of the answer itself."""
        return self.inside or bool(self._forced)

    @property
    def can_close(self) -> bool:
        """Whether the tokens that end the current thinking are known."""
        return self.inside and self._limit is not None

    def close(self) -> int | None:
        """Return the first token that ends the thinking now; ``take`` returns the others."""
        limit = self._limit
        assert limit is not None, "it can be closed"
        self._forced = list(limit.closes[min(self._closed, len(limit.closes) - 1)])
        self._closed += 1
        return self.take()

    def take(self, *, instead: int | None = None) -> int | None:
        """Return the token that must come next, if any. If ``instead`` has come and is another, as
        under another limit, none must come.
        """
        if instead is not None and self._forced[:1] != [instead]:
            self._forced.clear()
        return self._forced.pop(0) if self._forced else None

    def follow(self, inside: bool, *, forced: bool) -> None:
        """Record a token, chosen or ``forced``; ``inside``: the text now ends within thinking."""
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
        """Return how many of ``left`` tokens are worth drafting, plus the token after them.

        Forced tokens are not drafted.
        """
        if self._forced:
            return min(left, 1)
        if self._limit is None or self._limit.tokens is None or not self.inside:
            return left
        return min(left, self._limit.tokens - self.tokens + 1)
