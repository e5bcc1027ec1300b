"""Prompt lookup: what followed the last time the last n tokens were these.

It looks in the sequence itself and in an archive of the model's earlier answers. An index keeps,
for a few n, the latest place of every n-gram and the place before that, so that a token is added in
constant time. The continuations of the longest match are counted into a tree, and those of shorter
matches fill what is left (prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023). It knows no
model: text that repeats itself is all it takes.
"""

from __future__ import annotations

import heapq
import math
import threading
from array import array
from collections.abc import Sequence

import numpy as np

from localrt.speculative.source import Check, DraftSource
from localrt.speculative.tree import ROOT, TokenTree, merge

__all__ = ["ORDERS", "Archive", "NgramIndex", "NgramSource", "common_length"]

# Lengths of the contexts, longest first.
ORDERS = (8, 5, 3, 2, 1)
# How far a first continuation is to be believed before anything was learned, by order.
_TRUST = {8: 0.9, 5: 0.8, 3: 0.6, 2: 0.4, 1: 0.2}
# Old places looked at for one context: the latest say most.
_PLACES = 16
# A match lasts: what follows a confirmed guess is likelier than the guess was.
_LASTS = 0.9
_WEAKEST = 1e-3  # probability of a guess that is not worth a row
_ARCHIVED = 1 << 17  # tokens; an index takes about 1 KB for each


class NgramIndex:
    """Tokens in a row and where their n-grams stand. Appending is O(orders), trimming is not."""

    def __init__(self) -> None:
        self.tokens = array("q")
        self._latest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in ORDERS}
        # For each order, the place before of the n-gram that ends here, or -1.
        self._before: dict[int, array[int]] = {n: array("q") for n in ORDERS}

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for order in ORDERS:
                before = -1
                if end >= order:
                    gram = tuple(self.tokens[end - order : end])
                    before = self._latest[order].get(gram, -1)
                    self._latest[order][gram] = end
                self._before[order].append(before)

    def places(self, context: Sequence[int], order: int) -> list[int]:
        """Where what follows the last ``order`` tokens of ``context`` begins, latest first."""
        if len(context) < order:
            return []
        place = self._latest[order].get(tuple(context[-order:]), -1)
        found: list[int] = []
        while place >= 0 and len(found) < _PLACES:
            if place < len(self.tokens):  # something follows
                found.append(place)
            place = self._before[order][place - 1]
        return found


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that are the same."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:  # of two lists, at the speed of C
        return size
    differ = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differ[0]) if len(differ) else size


def continuations(
    index: NgramIndex, context: Sequence[int], budget: int, depth: int, source: str
) -> TokenTree:
    """The tree of what followed the context's endings in ``index``, ranked by count."""
    trees: list[TokenTree] = []
    seen: set[int] = set()
    found = 0
    for order in ORDERS:
        places = [p for p in index.places(context, order) if p not in seen]
        if not places:
            continue
        seen.update(places)
        tree = _counted(index.tokens, places, _TRUST[order], budget, depth, source)
        trees.append(tree)
        found += len(tree)
        if found >= budget or len(seen) >= _PLACES:
            break
    return merge(trees, budget)


def _counted(
    tokens: Sequence[int],
    places: Sequence[int],
    trust: float,
    budget: int,
    depth: int,
    source: str,
) -> TokenTree:
    """Best-first tree of the continuations at ``places``: a child's share of its parent's count."""
    ids: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # Best first; the number keeps equals in order: (-score, number, token, parent, depth, places).
    heap: list[tuple[float, int, int, int, int, list[int]]] = []
    number = 0

    def push(parent: int, score: float, at: int, group: Sequence[int]) -> None:
        nonlocal number
        followers: dict[int, list[int]] = {}
        for place in group:
            if place + at < len(tokens):
                followers.setdefault(tokens[place + at], []).append(place)
        total = sum(map(len, followers.values()))
        lasting = 1 - (1 - trust) * _LASTS**at  # rises towards 1 while guesses are confirmed
        for token, its in followers.items():
            # One more for what was never seen there.
            value = score + math.log(lasting * len(its) / (total + (len(followers) > 1)))
            if value > math.log(_WEAKEST):
                heapq.heappush(heap, (-value, number, token, parent, at + 1, its))
                number += 1

    push(ROOT, 0.0, 0, places)
    while heap and len(ids) < budget:
        negative, _, token, parent, level, its = heapq.heappop(heap)
        node = len(ids)
        ids.append(token)
        parents.append(parent)
        scores.append(-negative)
        if level < depth:
            push(node, -negative, level, its)
    return TokenTree.of(ids, parents, scores, source)


class Archive:
    """Answers so far, of all sequences of a model. Thread-safe."""

    def __init__(self, *, most: int = _ARCHIVED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._index = NgramIndex()

    def __len__(self) -> int:
        return len(self._index)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an answer. Beyond its bound an archive keeps its newer half."""
        with self._lock:
            if len(self._index) + len(tokens) > self._most:
                kept = [*self._index.tokens, *tokens][-self._most // 2 :]
                self._index = NgramIndex()
                self._index.extend(kept)
            else:
                self._index.extend(tokens)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._index = NgramIndex()

    def tree(self, history: Sequence[int], budget: int, depth: int) -> TokenTree:
        """Guesses of what follows ``history``."""
        with self._lock:
            return continuations(self._index, history[-max(ORDERS) :], budget, depth, "archive")


class NgramSource(DraftSource):
    """Guesses from the sequence's own past, the prompt included, and from an ``archive``."""

    name = "ngram"

    def __init__(self, archive: Archive | None = None) -> None:
        self._archive = archive
        self._index = NgramIndex()

    def begin(self, history: Sequence[int]) -> None:
        """See ``DraftSource``."""
        held = len(self._index)
        if held > len(history) or common_length(self._index.tokens.tolist(), history) < held:
            self._index = NgramIndex()

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """See ``DraftSource``."""
        self._index.extend(history[len(self._index) :])
        tree = continuations(self._index, history[-max(ORDERS) :], budget, depth, self.name)
        if self._archive is None:
            return tree
        return merge([tree, self._archive.tree(history, budget, depth)], budget)
