"""A small model that drafts for a large one: SpecExec's tree, with keys and values of its own.

The cache holds the known tokens and, behind them, a row for every node that was expanded, so that a
round computes its new nodes only. What the target accepts of a tree stays for the next one. It
knows no target: two models fit when they share a vocabulary, which is the caller's to check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.protocol import Batch, KVCache, Span
from localrt.speculative.best_first import Children, grow, likeliest
from localrt.speculative.ngram import common_length
from localrt.speculative.source import Check, DraftFailedError
from localrt.speculative.tree import ROOT, TokenTree

__all__ = ["DraftDecoder", "DraftModelSource"]

_PREFILL_ROWS = 512


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
        room = cache.capacity - len(history)
        depth = min(depth, room)
        if room <= 0 or budget <= 0 or depth <= 0:
            return TokenTree.empty()
        first = self._catch_up(cache, history, check)
        self._rows = rows = _Rows()
        base = cache.length
        vocab = self._vocab

        def children(logits: npt.NDArray[np.float32], least: float) -> Children:
            try:
                return likeliest(logits[:vocab], least, temperature=self._temperature)
            except ValueError as error:
                raise DraftFailedError(f"the draft model computes no numbers: {error}") from error

        def expand(
            nodes: Sequence[tuple[int, int, int]], least: Sequence[float]
        ) -> Sequence[Children]:
            if nodes[0][0] == ROOT:
                return [children(first, least[0])]
            free = cache.capacity - base - len(rows)
            run = nodes[: max(free, 0)]
            none = Children(np.empty(0, np.int64), np.empty(0, np.float64))
            if not run:
                return [none] * len(nodes)
            rows.add(run)
            logits = self._decode(cache, base, rows, len(run), check)
            found = [children(row, low) for row, low in zip(logits, least, strict=False)]
            return [*found, *[none] * (len(nodes) - len(run))]

        return grow(
            expand, budget=budget, depth=depth, source=self.name, round_nodes=self._round_nodes
        )

    def close(self) -> None:
        """Free the cache."""
        self._cache = None
        self._known = []

    # -- parts -----------------------------------------------------------------------------------

    def _catch_up(
        self, cache: KVCache, history: Sequence[int], check: Check | None
    ) -> npt.NDArray[np.float32]:
        """Bring the cache to ``history``; logits (vocab,) after it."""
        same = common_length(self._known, history)
        if same == len(self._known):
            # The last token is computed again where the tree had it: its logits are gone.
            path = self._rows.path(history[same : len(history) - 1])
            cache.select(same, path)
            self._known += history[same : same + len(path)]
        else:
            cache.trim(same)
            del self._known[same:]
        self._rows = _Rows()
        if len(self._known) == len(history):
            cache.trim(len(history) - 1)
            del self._known[-1]
        missing = history[len(self._known) :]
        for start in range(0, len(missing), _PREFILL_ROWS):
            part = missing[start : start + _PREFILL_ROWS]
            last = start + len(part) == len(missing)
            batch = Batch.extend([(cache, part)])
            logits = self._decoder.forward(batch, rows=[len(part) - 1] if last else [], check=check)
            self.passes += 1
            self._known += part
        first: npt.NDArray[np.float32] = logits[0]
        return first

    def _decode(
        self, cache: KVCache, base: int, rows: _Rows, new: int, check: Check | None
    ) -> npt.NDArray[np.float32]:
        """Logits of the ``new`` last rows."""
        start = len(rows) - new if self._held_rows else 0
        if not self._held_rows:
            cache.trim(base)
        mask = rows.mask()[start:]
        batch = Batch(
            np.array(rows.tokens[start:], np.int64),
            base + np.array(rows.depths[start:], np.int64) - 1,
            (Span(cache, len(rows) - start, mask),),
        )
        wanted = range(len(rows) - new - start, len(rows) - start)
        logits = self._decoder.forward(batch, rows=list(wanted), check=check)
        self.passes += 1
        return logits


class _Rows:
    """The nodes that have rows in the cache, in order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self._parents: list[int] = []  # rows
        self._row: dict[int, int] = {}  # of a node
        self._child: dict[tuple[int, int], int] = {}  # (row of the parent, token) to row

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, nodes: Sequence[tuple[int, int, int]]) -> None:
        """Rows for nodes (node, token, parent), behind the others."""
        for node, token, parent in nodes:
            above = ROOT if parent == ROOT else self._row[parent]
            row = len(self.tokens)
            self.tokens.append(token)
            self._parents.append(above)
            self.depths.append(1 if above == ROOT else self.depths[above] + 1)
            self._row[node] = row
            self._child[above, token] = row

    def mask(self) -> npt.NDArray[np.bool_]:
        """(rows, rows), True where seen."""
        seen = np.eye(len(self), dtype=np.bool_)
        for row, above in enumerate(self._parents):
            if above != ROOT:
                seen[row] |= seen[above]
        return seen

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The rows of the longest beginning of ``tokens`` that has rows."""
        rows: list[int] = []
        above = ROOT
        for token in tokens:
            row = self._child.get((above, token))
            if row is None:
                break
            rows.append(row)
            above = row
        return rows
