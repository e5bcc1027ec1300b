"""The contract of whatever guesses the next tokens.

A source is handed the whole history at every step and finds out by itself what is new of it:
nothing has to be told that a guess was right. It knows no target and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from localrt.errors import LocalrtError
from localrt.speculative.tree import TokenTree

__all__ = ["Check", "DraftFailedError", "DraftSource"]

# Called now and then while a source works; raises CancelledError to abandon it.
Check = Callable[[], None]


class DraftFailedError(LocalrtError):
    """A source cannot go on: its model computes no numbers, or its memory is used up."""


class DraftSource(Protocol):
    """Guesses for one sequence. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """``"ngram"``, ``"said"``, ``"model"``."""

    def begin(self, history: Sequence[int]) -> None:
        """A generation begins with ``history``, which need not go on from what was seen so far."""

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """At most ``budget`` guesses of what follows ``history``, at most ``depth`` ahead.

        ``history`` is not empty, and goes on from that of the call before.

        Raises:
            DraftFailedError: the source is of no use any more; it must not be called again.
        """

    def close(self) -> None:
        """Free what it holds."""
