"""A small model that drafts for a large one: SpecExec's tree, with keys and values of its own.

The cache holds the known tokens and, behind them, a row for every node that was expanded, so that a
round computes its new nodes only. What the target accepts of a tree stays for the next one, and so
does what lies below it: drafting ahead, while the target is at work, is growing the tree beyond
what was asked for. It knows no target: two models fit when they share a vocabulary, which is the
caller's to check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localrt.errors import CancelledError
from localrt.quant.ops.protocol import Batch, KVCache, Span
from localrt.speculative.best_first import Children, Expand, Growth, likeliest
from localrt.speculative.ngram import common_length
from localrt.speculative.source import Check, DraftFailedError, Outcome
from localrt.speculative.tree import ROOT, TokenTree

__all__ = ["DraftDecoder", "DraftModelSource"]

_PREFILL_ROWS = 512
# Nodes of a round of drafting ahead: a decoder's pass over a few costs about what one does.
_AHEAD_NODES = 4
_AHEAD_ROWS = 32  # of a prompt, at once, in the gaps of a pass


class DraftDecoder(Protocol):
    """As much of a decoder as drafting needs; passes of several threads take turns."""

    def cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence."""

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Logits of the chosen rows, (rows, vocab)."""


class DraftModelSource:
    """See ``DraftSource``. ``capacity`` is the longest history with its tree, in tokens.

    ``temperature`` is the target's: a draft guesses best what is sampled as it would sample itself;
    a greedy target is guessed with 1. ``vocab_size`` bounds the tokens, where the target's logits
    have fewer rows than the draft's. ``held_rows`` says whether a pass's mask may cover rows of
    earlier passes: without, a round computes the tree so far again.
    """

    name = "model"
    prepares = True

    def __init__(
        self,
        decoder: DraftDecoder,
        *,
        capacity: int,
        vocab_size: int,
        temperature: float = 1.0,
        held_rows: bool = True,
        round_nodes: int = 128,
    ) -> None:
        self._decoder = decoder
        self._cache: KVCache | None = decoder.cache(capacity)
        self._vocab = vocab_size
        self._temperature = temperature or 1.0
        self._held_rows = held_rows
        self._round_nodes = round_nodes
        self._known: list[int] = []  # the tokens whose keys and values come first in the cache
        self._first: npt.NDArray[np.float32] | None = None  # logits after them
        self._growth = Growth(self.name)
        self._rows = _Rows()
        self.passes = 0  # of the draft, for whoever measures

    def begin(self, history: Sequence[int]) -> None:
        """See ``DraftSource``: what is the same of it stays in the cache."""

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """See ``DraftSource``."""
        cache = self._cache
        if cache is None:
            raise DraftFailedError("the draft is closed")
        depth = min(depth, cache.capacity - len(history))
        if budget <= 0 or depth <= 0:
            return TokenTree.empty()
        self._follow(cache, history, check)
        return self._growth.grow(
            self._expander(cache, check), budget=budget, depth=depth, round_nodes=self._round_nodes
        )

    def missing(self, history: Sequence[int]) -> int:
        """See ``AheadSource``."""
        if self._nodes_of(history) is not None:
            return 0
        return len(history) - common_length(self._known, history)

    def catch_up(self, history: Sequence[int], *, check: Check | None = None) -> None:
        """See ``AheadSource``."""
        cache = self._cache
        if cache is None:
            raise DraftFailedError("the draft is closed")
        if len(history) < cache.capacity:
            self._follow(cache, history, check)

    def ready(self, history: Sequence[int]) -> int:
        """See ``AheadSource``."""
        nodes = self._nodes_of(history)
        if nodes is None:
            return 0
        return self._growth.levels(nodes[-1] if nodes else ROOT)

    def ahead(self, history: Sequence[int], nodes: int, *, check: Check, outcome: Outcome) -> None:
        """See ``AheadSource``: best-first, whatever the depth."""
        cache = self._cache
        if cache is None:
            raise DraftFailedError("the draft is closed")
        depth = cache.capacity - len(history)
        if depth <= 0:
            return
        if not self._follow(cache, history, check, rows=_AHEAD_ROWS, outcome=outcome):
            return

        def expand(
            batch: Sequence[tuple[int, int, int]], least: Sequence[float]
        ) -> Sequence[Children]:
            def between() -> None:
                check()
                true = outcome()
                if true is not None and not self._below(true, batch):
                    raise CancelledError("the pass came to something else")

            return self._expander(cache, between)(batch, least)

        while nodes > 0 and outcome() is None:
            done = self._growth.reach(expand, nodes=min(nodes, _AHEAD_NODES), depth=depth)
            if not done:
                return
            nodes -= done

    def close(self) -> None:
        """Free the cache."""
        self._cache = None
        self._known = []
        self._forget()

    # -- the tree --------------------------------------------------------------------------------

    def _expander(self, cache: KVCache, check: Check | None) -> Expand:
        def expand(
            nodes: Sequence[tuple[int, int, int]], least: Sequence[float]
        ) -> Sequence[Children]:
            if nodes[0][0] == ROOT:
                first, self._first = self._first, None
                assert first is not None, "it was computed when the tree began"
                return [self._children(first, least[0])]
            run = nodes[: max(cache.capacity - cache.length, 0)]
            none = Children(np.empty(0, np.int64), np.empty(0, np.float64))
            if not run:
                return [none] * len(nodes)
            logits = self._decode(cache, run, check)
            found = [self._children(row, low) for row, low in zip(logits, least, strict=False)]
            return [*found, *[none] * (len(nodes) - len(run))]

        return expand

    def _children(self, logits: npt.NDArray[np.float32], least: float) -> Children:
        try:
            return likeliest(logits[: self._vocab], least, temperature=self._temperature)
        except ValueError as error:
            raise DraftFailedError(f"the draft model computes no numbers: {error}") from error

    def _below(self, true: Sequence[int], batch: Sequence[tuple[int, int, int]]) -> bool:
        """Whether any node of a round continues the tokens that came true, or is one of them."""
        nodes = self._growth.walk(true)
        if len(nodes) < len(true):
            return False
        return any(self._rows.descends(parent, nodes[-1]) for _, _, parent in batch) or any(
            node == nodes[-1] for node, _, _ in batch
        )

    def _forget(self) -> None:
        """No tree any more."""
        self._growth, self._rows, self._first = Growth(self.name), _Rows(), None

    def _nodes_of(self, history: Sequence[int]) -> list[int] | None:
        """The nodes that ``history`` has behind the known tokens; None unless all have rows."""
        new = len(history) - len(self._known)
        if new < 0 or common_length(self._known, history) < len(self._known):
            return None
        nodes = self._growth.walk(history[len(self._known) :])
        if len(nodes) < new or any(node not in self._rows for node in nodes):
            return None
        return nodes if nodes or self._growth.levels() else None

    # -- the cache -------------------------------------------------------------------------------

    def _follow(
        self,
        cache: KVCache,
        history: Sequence[int],
        check: Check | None,
        *,
        rows: int = _PREFILL_ROWS,
        outcome: Outcome = lambda: None,
    ) -> bool:
        """Bring cache and tree to ``history``: what is there of it stays.

        What is missing is computed ``rows`` tokens at a time; False if there was an ``outcome``
        before all of it had been.
        """
        nodes = self._nodes_of(history)
        if nodes is not None:
            if nodes:
                growth, number = self._growth.below(nodes[-1])
                kept, places = self._rows.below(nodes, number)
                cache.select(len(self._known), places)
                self._known += history[len(self._known) :]
                self._growth, self._rows = growth, kept
            return True
        same = common_length(self._known, history)
        if same == len(self._known):
            # The last token is computed again where the tree had it: its logits are gone.
            behind = self._growth.walk(history[same : len(history) - 1])
            path = [self._rows[node] for node in takewhile(self._rows.__contains__, behind)]
            cache.select(same, path)
            self._known += history[same : same + len(path)]
        else:
            cache.trim(same)
            del self._known[same:]
        self._forget()
        if len(self._known) == len(history):
            cache.trim(len(history) - 1)
            del self._known[-1]
        missing = history[len(self._known) :]
        for start in range(0, len(missing), rows):
            if outcome() is not None:
                return False
            part = missing[start : start + rows]
            last = start + len(part) == len(missing)
            batch = Batch.extend([(cache, part)])
            logits = self._decoder.forward(batch, rows=[len(part) - 1] if last else [], check=check)
            self.passes += 1
            self._known += part
        self._first = logits[0]
        return True

    def _decode(
        self, cache: KVCache, nodes: Sequence[tuple[int, int, int]], check: Check | None
    ) -> npt.NDArray[np.float32]:
        """Logits (nodes, vocab) of new nodes, which get rows."""
        rows = self._rows
        held = len(rows) if self._held_rows else 0
        if not self._held_rows:
            cache.trim(len(self._known))
        rows.add(nodes)
        count = len(rows) - held
        batch = Batch(
            np.array(rows.tokens[held:], np.int64),
            len(self._known) + np.array(rows.depths[held:], np.int64) - 1,
            (Span(cache, count, rows.mask(held)),),
        )
        try:
            logits = self._decoder.forward(
                batch, rows=range(count - len(nodes), count), check=check
            )
        except BaseException:
            if self._held_rows:
                rows.drop(len(nodes))
            else:  # the others have lost their places too
                self._forget()
                cache.trim(len(self._known))
            raise
        self.passes += 1
        return logits


class _Rows:
    """The nodes that have rows in the cache, in order: a node's row is ``self[node]``."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self._nodes: list[int] = []
        self._row: dict[int, int] = {}  # of a node
        self._seen: list[tuple[int, ...]] = []  # the rows on the way to a row, and itself

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, node: int) -> bool:
        return node in self._row

    def __getitem__(self, node: int) -> int:
        return self._row[node]

    def add(self, nodes: Sequence[tuple[int, int, int]]) -> None:
        """Rows for nodes (node, token, parent), behind the others."""
        for node, token, parent in nodes:
            self._append(node, token, () if parent == ROOT else self._seen[self._row[parent]])

    def _append(self, node: int, token: int, above: tuple[int, ...]) -> None:
        row = len(self.tokens)
        self.tokens.append(token)
        self.depths.append(len(above) + 1)
        self._nodes.append(node)
        self._row[node] = row
        self._seen.append((*above, row))

    def drop(self, count: int) -> None:
        """Forget the last rows."""
        for node in self._nodes[len(self) - count :]:
            del self._row[node]
        for values in (self.tokens, self.depths, self._nodes, self._seen):
            del values[len(values) - count :]

    def mask(self, first: int) -> npt.NDArray[np.bool_]:
        """(rows from ``first`` on, all rows), True where seen."""
        seen = np.zeros((len(self) - first, len(self)), np.bool_)
        for row, columns in enumerate(self._seen[first:]):
            seen[row, list(columns)] = True
        return seen

    def descends(self, node: int, top: int) -> bool:
        """Whether the row of ``node`` is that of ``top`` or lies below it."""
        return node in self._row and top in self._row and self._row[top] in self._seen[self[node]]

    def below(self, path: Sequence[int], number: Mapping[int, int]) -> tuple[_Rows, list[int]]:
        """The rows of the nodes that have a new ``number``, and the places of all that stay.

        ``path`` leads to what they are below, and stays in front of them.
        """
        new = _Rows()
        places = [self._row[node] for node in path]
        now: dict[int, int] = {}
        for row, node in enumerate(self._nodes):
            if node not in number:
                continue
            now[row] = len(new)
            above = tuple(now[r] for r in self._seen[row][len(path) : -1])
            new._append(number[node], self.tokens[row], above)
            places.append(row)
        return new, places
