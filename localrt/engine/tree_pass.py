"""What came of one pass over a token tree, taken one confirmed token after another.

Whoever chooses tokens asks for the logits after each: they are there as long as the choice is one
that the tree guessed (the accept rule of ``localrt.speculative.verify``). It decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from localrt.engine.protocol import Check, EngineSession, Logits
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.verify import follow

__all__ = ["TreePass", "TreeSession", "likely"]


@runtime_checkable
class TreeSession(EngineSession, Protocol):
    """An ``EngineSession`` that can compute a token tree in one pass."""

    def extend_tree(self, token: int, tree: TokenTree, *, check: Check | None = None) -> Logits:
        """Compute ``token`` and, behind it, ``tree``: logits (1 + nodes, vocab), the token's first.

        ``tokens`` stays as it is until ``keep`` says what of it is wanted; nothing else may be
        computed before. When ``check`` raises, the session is as before.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the tree's pass, a path in order, as the session's next tokens."""


class TreePass:
    """A pass of ``session`` over ``tree``; ``path`` are the nodes confirmed so far."""

    def __init__(self, session: TreeSession, tree: TokenTree, logits: Logits) -> None:
        self._session = session
        self._logits = logits
        self.tree = tree
        self.path: list[int] = []

    @property
    def first(self) -> Logits:
        """Logits (vocab,) after the token that the tree hangs on."""
        row: Logits = self._logits[0]
        return row

    def after(self, token: int) -> Logits | None:
        """Logits (vocab,) after ``token``, which was chosen; None where the tree has no such."""
        node = follow(self.tree, self.path[-1] if self.path else ROOT, token)
        if node is None:
            return None
        self.path.append(node)
        row: Logits = self._logits[1 + node]
        return row

    def close(self) -> None:
        """The session keeps what was confirmed, and can go on."""
        self._session.keep([0, *(1 + node for node in self.path)])


def likely(tree: TokenTree, logits: Logits) -> list[int]:
    """The likeliest tokens after a pass with ``logits`` (1 + nodes, vocab): of greedy decoding."""
    tokens: list[int] = []
    node: int | None = ROOT
    while node is not None:
        tokens.append(int(logits[1 + node].argmax()))
        node = follow(tree, node, tokens[-1])
    return tokens
