"""Prompt lookup: propose the tokens that followed earlier occurrences of the last n tokens.

It searches the sequence itself and an archive of the model's earlier answers. Tokens are stored as
they are: one search finds all places of the last token, and filters those with the same tokens
before it. The continuations of the longest match are counted into a tree, and those of shorter
matches fill the rest (prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023). It needs no
model, only text that repeats itself.
"""

from __future__ import annotations

import heapq
import math
import threading
from array import array
from collections.abc import Sequence

import numpy as np

from localrt.speculative.source import Check, DraftSource, TreeSize
from localrt.speculative.tree import ROOT, TokenTree, merge

# Lengths of the contexts, longest first.
ORDERS = (8, 5, 3, 2, 1)
# The initial probability that a first continuation is accepted, by context length.
_TRUST = {8: 0.9, 5: 0.8, 3: 0.6, 2: 0.4, 1: 0.2}
# Earlier places considered for one context: the latest are most useful.
_PLACES = 16
# A match persists: after an accepted token, the next one is likelier to be accepted.
_LASTS = 0.9
_WEAKEST = 1e-3  # a token less probable than this is not worth a row
_ARCHIVED = 1 << 17  # tokens of 4 bytes: a search takes 0.1 to 0.2 ms


def places(tokens: array[int], context: Sequence[int]) -> dict[int, list[int]]:
    """Return, for each of ``ORDERS``, the places in ``tokens`` right after an occurrence of the
    last ``order`` tokens of ``context``, the latest first; orders without any are left out.
    """
    found: dict[int, list[int]] = {}
    if not tokens or not context:
        return found
    held = np.frombuffer(tokens, np.int32)
    ends = 1 + np.flatnonzero(held[:-1] == context[-1])  # of n-grams that have a next token
    for order in range(1, 1 + min(max(ORDERS), len(context))):
        if order > 1:
            ends = ends[np.searchsorted(ends, order) :]
            ends = ends[held[ends - order] == context[-order]]
        if not len(ends):
            break
        if order in ORDERS:
            found[order] = ends[: -_PLACES - 1 : -1].tolist()
    return found


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that are the same."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:  # lists are compared at the speed of C
        return size
    differ = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differ[0]) if len(differ) else size


def continuations(
    tokens: array[int], context: Sequence[int], budget: int, depth: int, source: str
) -> TokenTree:
    """Return the tree of what followed the endings of ``context`` in ``tokens``, by count."""
    trees: list[TokenTree] = []
    seen: set[int] = set()
    found = 0
    followed = places(tokens, context)
    for order in ORDERS:
        new = [place for place in followed.get(order, ()) if place not in seen]
        if not new:
            continue
        seen.update(new)
        tree = _counted(tokens, new, _TRUST[order], budget, depth, source)
        trees.append(tree)
        found += len(tree)
        if found >= budget or len(seen) >= _PLACES:
            break
    return merge(trees, budget)


def _counted(
    tokens: Sequence[int], places: Sequence[int], trust: float, budget: int, depth: int, source: str
) -> TokenTree:
    """Build the best-first tree of the continuations at ``places``, with each child's share of
    counts.
    """
    ids: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # Best first; the number keeps ties in order: (-score, number, token, parent, depth, places).
    heap: list[tuple[float, int, int, int, int, list[int]]] = []
    number = 0

    def push(parent: int, score: float, at: int, group: Sequence[int]) -> None:
        nonlocal number
        followers: dict[int, list[int]] = {}
        for place in group:
            if place + at < len(tokens):
                followers.setdefault(tokens[place + at], []).append(place)
        total = sum(map(len, followers.values()))
        lasting = 1 - (1 - trust) * _LASTS**at  # rises towards 1 while tokens are accepted
        for token, its in followers.items():
            # One more count for tokens never seen there.
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
    """The answers so far, of all sequences of a model. Thread-safe."""

    def __init__(self, *, most: int = _ARCHIVED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._tokens = array("i")

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer. An archive that grows too large keeps its newer half."""
        with self._lock:
            self._tokens.extend(tokens)
            if len(self._tokens) > self._most:
                del self._tokens[: -self._most // 2]

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            del self._tokens[:]

    def tree(self, history: Sequence[int], budget: int, depth: int) -> TokenTree:
        """Return a tree of tokens that may follow ``history``."""
        with self._lock:
            return continuations(self._tokens, history, budget, depth, "archive")


class NgramSource(DraftSource):
    """Drafts from the sequence's own tokens, prompt included, and from an ``archive``."""

    name = "ngram"

    def __init__(self, archive: Archive | None = None) -> None:
        self._archive = archive
        self._tokens = array("i")

    def begin(self, history: Sequence[int]) -> None:
        del self._tokens[common_length(self._tokens.tolist(), history) :]

    def propose(
        self, history: Sequence[int], size: TreeSize, *, check: Check | None = None
    ) -> TokenTree:
        self._tokens.extend(history[len(self._tokens) :])
        tree = continuations(self._tokens, history, size.budget, size.depth, self.name)
        if self._archive is None:
            return tree
        return merge([tree, self._archive.tree(history, size.budget, size.depth)], size.budget)
