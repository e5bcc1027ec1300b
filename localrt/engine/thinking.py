"""How long a model thinks in one answer, and the tokens that end it where a limit is reached.

Whoever chooses tokens asks here first. It does not know how thinking is spelled: a parser tells
whether an answer's text is within it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Thinking", "ThinkingLimit"]


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
        """Of ``left`` tokens to come, those worth a guess and the one after them.

        What is forced is not guessed.
        """
        if self._forced:
            return min(left, 1)
        if self._limit is None or self._limit.tokens is None or not self.inside:
            return left
        return min(left, self._limit.tokens - self.tokens + 1)
