"""Guesses of a DGF draft head, as SpecExec's tree.

The head's cache holds a row for every known token whose hidden state the target has computed, and
behind them, while a tree grows, a row for every node that was expanded; those go when the tree is
done, since what they took in for hidden states were guesses. It knows a session's hidden states and
how to compute undisturbed, and nothing else of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.protocol import KVCache, Ops
from localrt.speculative.best_first import Children, grow, likeliest
from localrt.speculative.dgf_head import DgfHead
from localrt.speculative.ngram import common_length
from localrt.speculative.source import Check, DraftFailedError
from localrt.speculative.tree import ROOT, TokenTree

__all__ = ["DgfSource", "Features"]

Floats = npt.NDArray[np.float32]

_PIECE = 512  # rows of a prompt in a pass


class Features(Protocol):
    """The hidden states of a sequence's tokens ``first`` to ``length``."""

    @property
    def first(self) -> int:
        """The first token whose row is held."""

    @property
    def length(self) -> int:
        """The token behind the last one whose row is held."""

    def get(self, start: int, stop: int) -> Floats:
        """Rows of tokens ``start`` to ``stop``, (stop - start, hidden size)."""


class DgfSource:
    """See ``DraftSource``. ``features`` are those of the sequence that is guessed.

    ``alone`` gives the head's ``Ops`` while nobody else computes. ``capacity`` is the longest
    history, ``most`` the most nodes of a tree. ``temperature`` is the target's: see
    ``DraftModelSource``.
    """

    name = "dgf"

    def __init__(
        self,
        head: DgfHead,
        features: Features,
        alone: Callable[[], AbstractContextManager[Ops]],
        *,
        capacity: int,
        most: int,
        temperature: float = 1.0,
        round_nodes: int = 16,
    ) -> None:
        self._head = head
        self._features = features
        self._alone = alone
        self._most = most
        self._temperature = temperature or 1.0
        self._round_nodes = round_nodes
        self._first = 0  # the token of the cache's first row
        self._known: list[int] = []  # the history whose rows the cache holds
        with alone() as ops:
            self._cache: KVCache | None = head.cache(ops, capacity + most)
        self.passes = 0  # of the head, for whoever measures

    def begin(self, history: Sequence[int]) -> None:
        """See ``DraftSource``: what is the same of it stays in the cache."""

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """See ``DraftSource``."""
        cache = self._cache
        if cache is None:
            raise DraftFailedError("the draft head is closed")
        budget = min(budget, self._most)
        if budget <= 0 or depth <= 0:
            return TokenTree.empty()
        held = cache.length
        try:
            with self._alone() as ops:
                found = self._catch_up(ops, cache, history, check)
                if found is None:
                    return TokenTree.empty()
                held = cache.length
                grown = _Growth(self, ops, cache, found, len(history) - 1, check)
                return grow(
                    grown.expand,
                    budget=budget,
                    depth=depth,
                    source=self.name,
                    round_nodes=self._round_nodes,
                )
        finally:
            cache.trim(min(held, cache.length))

    def close(self) -> None:
        """Free the cache."""
        self._cache = None
        self._known = []

    # -- parts -----------------------------------------------------------------------------------

    def _catch_up(
        self, ops: Ops, cache: KVCache, history: Sequence[int], check: Check | None
    ) -> tuple[Floats, Floats] | None:
        """Bring the cache to ``history``; the guessed feature (D,) of its last token, and logits.

        None where no hidden state is held to begin from.
        """
        # Row r takes in the hidden state of token r and the token after it.
        end = len(history) - 1
        same = common_length(self._known, history)
        rows = min(max(same - 1 - self._first, 0), cache.length, end - 1 - self._first)
        start = max(self._features.first, end - self._head.config.window)
        if rows <= 0 or self._first + rows < start:
            rows, self._first = 0, start
        cache.trim(rows)
        start = self._first + rows
        if start >= end or self._features.length < end:
            self._known = list(history[: start + 1])
            return None
        for at in range(start, end, _PIECE):
            if check is not None:
                check()
            stop = min(at + _PIECE, end)
            given = self._head.forward(
                ops,
                cache,
                self._features.get(at, stop),
                history[at + 1 : stop + 1],
                np.arange(at, stop),
                wanted=[stop - at - 1] if stop == end else [],
            )
            self.passes += 1
        self._known = list(history)
        return given.features[-1], given.logits[0]

    def children(self, logits: Floats, least: float) -> Children:
        """What the head takes for likely, as tokens of the target."""
        try:
            found = likeliest(logits, least, temperature=self._temperature)
        except ValueError as error:
            raise DraftFailedError(f"the draft head computes no numbers: {error}") from error
        return Children(self._head.draft_tokens[found.tokens], found.logprobs)

    def compute(
        self,
        ops: Ops,
        cache: KVCache,
        features: Floats,
        tokens: Sequence[int],
        positions: npt.NDArray[np.int64],
        mask: npt.NDArray[np.bool_],
    ) -> tuple[Floats, Floats]:
        """A round: features and logits of all its rows."""
        given = self._head.forward(
            ops, cache, features, tokens, positions, wanted=range(len(tokens)), mask=mask
        )
        self.passes += 1
        return given.features, given.logits


class _Growth:
    """One tree on its way: the rows of its expanded nodes, behind those of the history."""

    def __init__(
        self,
        source: DgfSource,
        ops: Ops,
        cache: KVCache,
        root: tuple[Floats, Floats],
        last: int,
        check: Check | None,
    ) -> None:
        self._source = source
        self._ops = ops
        self._cache = cache
        self._root = root
        self._last = last  # the position of the last known token
        self._check = check
        self._row: dict[int, int] = {}  # of a node
        self._depths: list[int] = []
        self._features: list[Floats] = []
        self._seen = np.zeros((0, 0), np.bool_)

    def expand(
        self, nodes: Sequence[tuple[int, int, int]], least: Sequence[float]
    ) -> Sequence[Children]:
        """See ``best_first.Expand``."""
        if nodes[0][0] == ROOT:
            return [self._source.children(self._root[1], least[0])]
        if self._check is not None:
            self._check()
        room = self._cache.capacity - self._cache.length
        run = nodes[: max(room, 0)]
        none = Children(np.empty(0, np.int64), np.empty(0, np.float64))
        if not run:
            return [none] * len(nodes)
        held = len(self._depths)
        given = []
        seen = np.zeros((held + len(run), held + len(run)), np.bool_)
        seen[:held, :held] = self._seen
        for node, _, parent in run:
            row = len(self._depths)
            seen[row, row] = True
            self._row[node] = row
            if parent == ROOT:
                self._depths.append(1)
                given.append(self._root[0])
            else:
                above = self._row[parent]
                seen[row] |= seen[above]
                self._depths.append(self._depths[above] + 1)
                given.append(self._features[above])
        self._seen = seen
        # Row r of the history takes in token r + 1: the first guess follows the last known token.
        positions = np.array(self._depths[held:], np.int64) + self._last - 1
        features, logits = self._source.compute(
            self._ops, self._cache, np.stack(given), [t for _, t, _ in run], positions, seen[held:]
        )
        self._features += list(features)
        found = [self._source.children(row, low) for row, low in zip(logits, least, strict=False)]
        return [*found, *[none] * (len(nodes) - len(run))]
