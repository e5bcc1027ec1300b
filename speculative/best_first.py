"""SpecExec's draft tree: the K likeliest continuations, found best-first in batches.

Each round expands the best unexpanded nodes among the K best so far, all in one batch; a child's
score is its parent's plus its log-probability plus log 0.95, so that depth costs a little. It ends
when every node among the K best has been expanded: no new one could be better (Svirschevski et al.
2024, algorithm 1). A tree can be grown further, and the part below any of its nodes is a tree
again. The caller defines how a node is expanded.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from localrt.speculative.tree import ROOT, TokenTree

DECAY = math.log(0.95)
CHILDREN = 32
_ROUND = 128  # nodes expanded at once
# Children with a log-probability above this are kept even if the tree has better nodes: a tree that
# later starts at their parent has fewer nodes.
_KEPT = -7.0


@dataclass(frozen=True, slots=True)
class Children:
    """The possible successors of one node: ``tokens`` and their ``logprobs``, best first."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]


_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_Result = TypeVar("_Result")

# Takes nodes to expand, as (node, its token, its parent), and for each the log-probability below
# which its children are not needed; -1 is the last known token. Returns ``Children`` for each.
Expand = Callable[[Sequence[tuple[int, int, int]], Sequence[float]], Sequence[Children]]
# The same as a generator, whose requests the caller answers.
ExpandBySteps = Callable[
    [Sequence[tuple[int, int, int]], Sequence[float]],
    Generator[_Request, _Reply, Sequence[Children]],
]


def drive(
    steps: Generator[_Request, _Reply, _Result], answer: Callable[[_Request], _Reply]
) -> _Result:
    """Run ``steps`` to their end with the ``answer`` to each request; they see its errors."""
    try:
        request = next(steps)
        while True:
            try:
                reply = answer(request)
            except BaseException as error:
                steps.throw(error)
                raise
            request = steps.send(reply)
    except StopIteration as done:
        result: _Result = done.value
        return result


class Growth:
    """A growing tree of ``source``. If ``expand`` raises, the tree has not changed."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._scores: list[float] = []
        self._at: dict[tuple[int, int], int] = {}  # nodes by parent and token
        self._children: dict[int, Children] = {}  # of expanded nodes
        # Heaps, best first: nodes to expand, and the best child of each that is no node yet.
        self._open: list[tuple[float, int]] = [(0.0, ROOT)]
        self._rest: list[tuple[float, int, int]] = []

    def grow(
        self, expand: Expand, *, budget: int, depth: int, round_nodes: int = _ROUND
    ) -> TokenTree:
        """Return the tree of the ``budget`` best nodes, at most ``depth`` deep.

        The first call of ``expand`` has the root alone.
        """
        by_steps = partial(_at_once, expand)
        rounds = self.rounds(by_steps, budget=budget, depth=depth, round_nodes=round_nodes)
        return drive(rounds, lambda asked: asked)

    def rounds(
        self,
        expand: ExpandBySteps[_Request, _Reply],
        *,
        budget: int,
        depth: int,
        round_nodes: int,
        least: float = 0.0,
    ) -> Generator[_Request, _Reply, TokenTree]:
        """``grow`` by the steps of ``expand``, until a round's nodes have less than ``least`` of
        all probability together.
        """
        while True:
            floor = self._admit(budget, depth)
            batch = self._take(round_nodes, depth, floor)
            if batch and sum(math.exp(self._score(node)) for node in batch) < least:
                self._put_back(batch)
                batch = []
            if not batch:
                return TokenTree.of(self._tokens, self._parents, self._scores, self._source).trim(
                    budget, depth
                )
            yield from self._expand(expand, batch, floor)

    def reach(self, expand: Expand, *, nodes: int, depth: int) -> int:
        """Run one more round, without a budget: expand the best ``nodes`` above level ``depth``.

        Returns how many nodes were expanded.
        """
        batch = self._take(nodes, depth, -math.inf, admit=True)
        if batch:
            by_steps = partial(_at_once, expand)
            drive(self._expand(by_steps, batch, -math.inf), lambda asked: asked)
        return len(batch)

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes of the longest prefix of ``tokens`` that is in the tree."""
        nodes: list[int] = []
        parent = ROOT
        for token in tokens:
            node = self._at.get((parent, token))
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def below(self, top: int) -> tuple[Growth, dict[int, int]]:
        """Return the tree below ``top``, with ``top`` as the last known token.

        Also returns the new number of each node that it keeps.
        """
        new = Growth(self._source)
        number = {top: ROOT}
        base = self._score(top)
        level = self.level(top)
        for node in range(top + 1, len(self._tokens)):
            parent = number.get(self._parents[node])
            if parent is None:
                continue
            number[node] = len(new._tokens)
            new._at[parent, self._tokens[node]] = number[node]
            new._tokens.append(self._tokens[node])
            new._parents.append(parent)
            new._depths.append(self._depths[node] - level)
            new._scores.append(min(self._scores[node] - base, 0.0))
        new._children = {number[n]: found for n, found in self._children.items() if n in number}
        new._open = [(value + base, number[n]) for value, n in self._open if n in number]
        new._rest = [(value + base, number[n], i) for value, n, i in self._rest if n in number]
        heapq.heapify(new._open)
        heapq.heapify(new._rest)
        del number[top]
        return new, number

    def levels(self, top: int = ROOT) -> int:
        """Count the expanded nodes on the likeliest path from ``top`` on, including ``top``."""
        node, count = top, 0
        while (found := self._children.get(node)) is not None and len(found.tokens):
            count += 1
            following = self._at.get((node, int(found.tokens[0])))
            if following is None:
                break
            node = following
        return count

    def path(self, node: int) -> list[int]:
        """Return the path from the first level to ``node``; empty for the last known token."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self._parents[node]
        return nodes[::-1]

    # -- parts -----------------------------------------------------------------------------------

    def _score(self, node: int) -> float:
        return 0.0 if node == ROOT else self._scores[node]

    def level(self, node: int) -> int:
        """Return a node's depth; 0 for the last known token."""
        return 0 if node == ROOT else self._depths[node]

    def _admit(self, budget: int, depth: int) -> float:
        """Add children that are among the best as nodes; return the score a node now needs."""
        levels = zip(self._scores, self._depths, strict=True)
        best = heapq.nlargest(budget, (score for score, level in levels if level <= depth))
        heapq.heapify(best)
        deep: list[tuple[float, int, int]] = []
        while self._rest:
            entry = heapq.heappop(self._rest)
            if len(best) >= budget and -entry[0] <= best[0]:
                deep.append(entry)
                break
            if self.level(entry[1]) >= depth:
                deep.append(entry)
                continue
            self._add(entry)
            (heapq.heapreplace if len(best) >= budget else heapq.heappush)(best, -entry[0])
        for entry in deep:
            heapq.heappush(self._rest, entry)
        return best[0] if len(best) >= budget else -math.inf

    def _add(self, entry: tuple[float, int, int]) -> None:
        """Add a child as a node, and offer its next sibling."""
        value, parent, index = entry
        node = len(self._tokens)
        token = int(self._children[parent].tokens[index])
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self.level(parent) + 1)
        self._scores.append(-value)
        self._at[parent, token] = node
        heapq.heappush(self._open, (value, node))
        self._offer(parent, index + 1)

    def _offer(self, parent: int, index: int) -> None:
        logprobs = self._children[parent].logprobs
        if index < len(logprobs):
            value = self._score(parent) + min(float(logprobs[index]), 0.0) + DECAY
            heapq.heappush(self._rest, (-value, parent, index))

    def _take(self, count: int, depth: int, floor: float, *, admit: bool = False) -> list[int]:
        """Return the best nodes to expand; with ``admit``, add better children as nodes first."""
        batch: list[int] = []
        deep: list[tuple[float, int]] = []
        while len(batch) < count and (self._open or (admit and self._rest)):
            if admit and self._rest and (not self._open or self._rest[0] < self._open[0]):
                self._add(heapq.heappop(self._rest))
                continue
            if -self._open[0][0] < floor:
                break
            entry = heapq.heappop(self._open)
            if self.level(entry[1]) < depth:
                batch.append(entry[1])
            else:
                deep.append(entry)
        for entry in deep:
            heapq.heappush(self._open, entry)
        return batch

    def _put_back(self, batch: Sequence[int]) -> None:
        for node in batch:
            heapq.heappush(self._open, (-self._score(node), node))

    def _expand(
        self, expand: ExpandBySteps[_Request, _Reply], batch: Sequence[int], floor: float
    ) -> Generator[_Request, _Reply, None]:
        asked = [
            (n, ROOT, ROOT) if n == ROOT else (n, self._tokens[n], self._parents[n]) for n in batch
        ]
        least = [min(floor - self._score(node) - DECAY, _KEPT) for node in batch]
        try:
            found = yield from expand(asked, least)
        except BaseException:
            self._put_back(batch)
            raise
        for node, children in zip(batch, found, strict=True):
            self._children[node] = children
            self._offer(node, 0)


def _at_once(
    expand: Expand, nodes: Sequence[tuple[int, int, int]], least: Sequence[float]
) -> Generator[None, None, Sequence[Children]]:
    yield from ()
    return expand(nodes, least)


def likeliest(
    logits: npt.NDArray[np.float32], least: float, *, temperature: float = 1.0, most: int = CHILDREN
) -> Children:
    """Return the ``most`` likeliest tokens of logits (V,) with log-probability above ``least``.

    The whole vocabulary is never sorted: unlikely tokens are cut off first.

    Raises:
        ValueError: the logits are not numbers.
    """
    top = float(logits.max())
    if not math.isfinite(top):
        raise ValueError("the logits are not numbers")
    scale = 1.0 / temperature
    spread = logits - np.float32(top)
    if temperature != 1.0:
        spread *= np.float32(scale)
    norm = math.log(float(np.exp(spread).sum(dtype=np.float64)))
    # The best ``most`` cannot be below 1 / V times the best; start high, where there are few.
    cut = max(least, -9.0)
    ids = np.flatnonzero(logits > top + (cut + norm) / scale)
    if len(ids) < most and cut > least:
        ids = np.flatnonzero(logits > top + (max(least, -30.0) + norm) / scale)
    if len(ids) > most:
        ids = ids[np.argpartition(logits[ids], len(ids) - most)[len(ids) - most :]]
    logprobs = (logits[ids].astype(np.float64) - top) * scale - norm
    order = np.lexsort((ids, -logprobs))
    return Children(ids[order].astype(np.int64), logprobs[order])
