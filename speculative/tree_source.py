"""The draft source of any ``Drafter``: SpecExec's tree, whose rows stay in a cache.

The cache holds the known tokens, followed by a row for every expanded node, so each round computes
only its new nodes. The part of a tree that the target accepts stays for the next one, and so does
the part below it: drafting ahead, while the target works, grows the tree further than was asked
for. If a drafter's draft rows do not last, each tree starts anew.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CancelledError
from localrt.quant.formats.packed import Floats
from localrt.speculative.best_first import Children, Growth, drive, likeliest
from localrt.speculative.ngram import common_length
from localrt.speculative.source import (
    MOST_NODES,
    Check,
    Drafter,
    DraftFailedError,
    DraftSource,
    Outcome,
    Proposal,
    Rows,
    Step,
    TreeSize,
)
from localrt.speculative.tree import ROOT, TokenTree

_PREFILL_ROWS = 512
# Nodes per round of drafting ahead: a pass over a few takes about as long as over one.
_AHEAD_NODES = 4
_AHEAD_ROWS = 32  # rows of a prompt computed at once, while a pass waits
_NO_CHILDREN = Children(np.empty(0, np.int64), np.empty(0, np.float64))

_Nodes = Sequence[tuple[int, int, int]]  # (node, its token, its parent)


class TreeSource(DraftSource):
    """Draft up to ``nodes`` nodes; a history and its tree have up to ``capacity`` tokens.

    ``temperature`` is the target's: a draft predicts sampled tokens best at the same temperature;
    for a greedy target it is 1. ``round_nodes`` are computed at once.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        capacity: int,
        nodes: int = MOST_NODES,
        temperature: float = 1.0,
        round_nodes: int = 128,
    ) -> None:
        self.name = drafter.name
        self.prepares = drafter.lasting
        self._drafter = drafter
        self._most_nodes = nodes
        self._temperature = temperature or 1.0
        self._round_nodes = round_nodes
        self._cache = drafter.cache(capacity)
        self._start = 0  # the index of the token in the cache's first row
        self._known: list[int] = []  # the known tokens, whose rows come first in the cache
        self._first: npt.NDArray[np.float32] | None = None  # logits (V,) after them
        self._growth = Growth(self.name)
        # The rows of expanded nodes, after those of the known tokens, in order.
        self._rows: dict[int, int] = {}
        self.passes = 0  # passes of the drafter, for measurements

    def propose(
        self, history: Sequence[int], size: TreeSize, *, check: Check | None = None
    ) -> TokenTree:
        return drive(self.proposal(history, size), partial(self._answer, check))

    def proposal(self, history: Sequence[int], size: TreeSize) -> Proposal:
        depth = min(size.depth, self._cache.capacity - len(history))
        budget = min(size.budget, self._most_nodes)
        if budget <= 0 or depth <= 0:
            return TokenTree.empty()
        try:
            if not (yield from self._follow(history)):
                return TokenTree.empty()
            return (
                yield from self._growth.rounds(
                    self._expand,
                    budget=budget,
                    depth=depth,
                    round_nodes=self._round_nodes,
                    least=size.least,
                )
            )
        finally:
            if not self._drafter.lasting:
                self._forget()
                self._cache.trim(len(self._known) - self._start)

    def missing(self, history: Sequence[int]) -> int:
        if self._nodes_of(history) is not None:
            return 0
        first = self._drafter.first(len(history)) or 0
        return len(history) - max(common_length(self._known, history), first)

    def catch_up(self, history: Sequence[int], *, check: Check | None = None) -> None:
        if len(history) < self._cache.capacity:
            drive(self._follow(history), partial(self._answer, check))

    def ready(self, history: Sequence[int]) -> int:
        nodes = self._nodes_of(history)
        if nodes is None:
            return 0
        return self._growth.levels(nodes[-1] if nodes else ROOT)

    def ahead(self, history: Sequence[int], nodes: int, *, check: Check, outcome: Outcome) -> None:
        depth = self._cache.capacity - len(history)
        if depth <= 0:
            return
        following = self._follow(history, rows=_AHEAD_ROWS, outcome=outcome)
        if not drive(following, partial(self._answer, check)):
            return

        def expand(batch: _Nodes, least: Sequence[float]) -> Sequence[Children]:
            def between() -> None:
                check()
                true = outcome()
                if true is not None and not self._below(true, batch):
                    raise CancelledError("the pass came to something else")

            return drive(self._expand(batch, least), partial(self._answer, between))

        while nodes > 0 and outcome() is None:
            done = self._growth.reach(expand, nodes=min(nodes, _AHEAD_NODES), depth=depth)
            if not done:
                return
            nodes -= done

    # -- the tree --------------------------------------------------------------------------------

    def _answer(self, check: Check | None, step: Step) -> Floats:
        return self._drafter.compute(step.cache, step.rows, check=check)

    def _expand(
        self, nodes: _Nodes, least: Sequence[float]
    ) -> Generator[Step, Floats, Sequence[Children]]:
        first, self._first = self._first, None
        if first is not None:  # a new tree, expanding its root alone
            return [children_of(first, least[0], self._temperature, self._drafter.tokens)]
        run = nodes[: max(self._cache.capacity - self._cache.length, 0)]
        if not run:
            return [_NO_CHILDREN] * len(nodes)
        logits = yield from self._compute(run)
        found = [
            children_of(row, low, self._temperature, self._drafter.tokens)
            for row, low in zip(logits, least, strict=False)
        ]
        return [*found, *[_NO_CHILDREN] * (len(nodes) - len(run))]

    def _below(self, true: Sequence[int], batch: _Nodes) -> bool:
        """Whether any node of a round continues the accepted tokens, or is one of them."""
        nodes = self._growth.walk(true)
        if len(nodes) < len(true):
            return False
        return any(nodes[-1] in self._growth.path(node) for node, _, _ in batch)

    def _forget(self) -> None:
        """Drop the tree."""
        self._growth, self._rows, self._first = Growth(self.name), {}, None

    def _nodes_of(self, history: Sequence[int]) -> list[int] | None:
        """Return the nodes of ``history`` after the known tokens; None unless all have rows."""
        new = len(history) - len(self._known)
        if new < 0 or common_length(self._known, history) < len(self._known):
            return None
        nodes = self._growth.walk(history[len(self._known) :])
        if len(nodes) < new or any(node not in self._rows for node in nodes):
            return None
        return nodes if nodes or self._growth.levels() else None

    # -- the cache -------------------------------------------------------------------------------

    def _follow(
        self, history: Sequence[int], *, rows: int = _PREFILL_ROWS, outcome: Outcome = lambda: None
    ) -> Generator[Step, Floats, bool]:
        """Update cache and tree to ``history``, and keep what they share with it.

        Missing tokens are computed ``rows`` at a time. Returns False if an ``outcome`` came before
        they were finished, or if drafting is impossible.
        """
        cache, nodes = self._cache, self._nodes_of(history)
        if nodes is not None:
            if nodes:
                self._growth, number = self._growth.below(nodes[-1])
                below = [node for node in self._rows if node in number]
                places = [self._rows[node] for node in [*nodes, *below]]
                cache.select(len(self._known) - self._start, places)
                self._known += history[len(self._known) :]
                self._rows = {number[node]: row for row, node in enumerate(below)}
            return True
        if self._first is not None and self._known == list(history):
            return True  # caught up before
        kept = common_length(self._known, history)
        if kept == len(self._known):
            # The last token is computed again if the tree had it: its logits are gone.
            behind = self._growth.walk(history[kept : len(history) - 1])
            path = [self._rows[node] for node in takewhile(self._rows.__contains__, behind)]
            cache.select(kept - self._start, path)
            kept += len(path)
        self._forget()
        kept = min(kept, len(history) - 1)
        first = self._drafter.first(len(history))
        if first is None or kept <= self._start or kept < first:
            kept = self._start = first or 0
        kept = self._start + cache.trim(kept - self._start)
        self._known = list(history[:kept])
        if first is None:
            return False
        for start in range(kept, len(history), rows):
            if outcome() is not None:
                return False
            tokens = history[start : start + rows]
            positions = np.arange(start, start + len(tokens))
            last = start + len(tokens) == len(history)
            logits = yield Step(self._drafter, cache, Rows(tokens, positions, int(last)))
            self.passes += 1
            self._known += tokens
        self._first = logits[0]
        return True

    def _compute(self, nodes: _Nodes) -> Generator[Step, Floats, Floats]:
        """Compute new nodes, which get rows; return their logits (nodes, V)."""
        rows = self._rows
        for node, _, _ in nodes:
            rows[node] = len(rows)
        paths = [self._growth.path(node) for node, _, _ in nodes]
        mask = np.zeros((len(nodes), len(rows)), np.bool_)
        for seen, path in zip(mask, paths, strict=True):
            seen[[rows[node] for node in path]] = True
        new = Rows(
            tokens=[token for _, token, _ in nodes],
            positions=len(self._known) - 1 + np.array([len(path) for path in paths], np.int64),
            wanted=len(nodes),
            mask=mask,
            above=[ROOT if parent == ROOT else rows[parent] for *_, parent in nodes],
        )
        try:
            logits = yield Step(self._drafter, self._cache, new)
        except BaseException:
            for node, _, _ in nodes:
                del rows[node]
            raise
        self.passes += 1
        return logits


def children_of(
    logits: Floats, least: float, temperature: float, tokens: npt.NDArray[np.int64] | None
) -> Children:
    """The ``likeliest`` of a draft's logits (V,), as the target's ``tokens``.

    Raises:
        DraftFailedError: the logits are not numbers.
    """
    try:
        found = likeliest(logits, least, temperature=temperature)
    except ValueError as error:
        raise DraftFailedError(f"the draft model produced NaN logits: {error}") from error
    return found if tokens is None else Children(tokens[found.tokens], found.logprobs)
