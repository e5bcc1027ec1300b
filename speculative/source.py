"""The contract of whatever guesses the next tokens.

A source is handed the whole history at every step and finds out by itself what is new of it:
nothing has to be told that a guess was right. It knows no target and no text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from localrt.errors import LocalrtError
from localrt.speculative.tree import TokenTree

__all__ = ["Check", "DraftFailedError", "DraftSource", "Outcome"]

# Called now and then while a source works; raises CancelledError to abandon it.
Check = Callable[[], None]
# The tokens that came true of the guesses, and the next one, once that is known.
Outcome = Callable[[], Sequence[int] | None]


class DraftFailedError(LocalrtError):
    """A source cannot go on: its model computes no numbers, or its memory is used up."""


class DraftSource(ABC):
    """Guesses for one sequence. Used by one thread at a time."""

    name: str
    """``"ngram"``, ``"model"``, ``"head"``."""

    prepares = False
    """Whether it can go on while its guesses are verified. The last four methods are for that."""

    def begin(self, history: Sequence[int]) -> None:  # noqa: B027 - most need nothing
        """A generation begins with ``history``, which need not go on from what was seen so far."""

    @abstractmethod
    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """At most ``budget`` guesses of what follows ``history``, at most ``depth`` ahead.

        ``history`` is not empty, and goes on from that of the call before.

        Raises:
            DraftFailedError: the source is of no use any more; it must not be called again.
        """

    def ahead(  # noqa: B027
        self, history: Sequence[int], nodes: int, *, check: Check, outcome: Outcome
    ) -> None:
        """Prepare what ``propose`` will be asked for next, by at most ``nodes`` steps of work.

        ``history`` is that of the last proposal, or goes on from it; with no ``nodes`` only what is
        missing of it is computed, in pieces. Once there is an ``outcome``,
        nothing is begun, and what is at work ends as soon as it is seen to be of no use.

        Raises:
            DraftFailedError: the source is of no use any more.
            CancelledError: ``check`` raised it, or the outcome is another.
        """

    def missing(self, history: Sequence[int]) -> int:
        """Tokens of ``history`` that must be computed before there can be a tree behind it."""
        return 0

    def catch_up(  # noqa: B027
        self, history: Sequence[int], *, check: Check | None = None
    ) -> None:
        """Compute them.

        Raises:
            DraftFailedError: the source is of no use any more.
        """

    def ready(self, history: Sequence[int]) -> int:
        """The levels of a tree behind ``history`` that were prepared; computes nothing."""
        return 0
