"""The draft tree: tokens that may follow the last known token, as an immutable value.

Parents come before their children, siblings differ, and scores never rise along a path, so the best
K nodes always form a tree. It knows no model, and only the names of sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# The parent of the first level: the last known token, which is not a node of the tree.
ROOT = -1
# Scores are sums of float logarithms: adding them in another order may change this much.
_SLACK = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """``n`` draft tokens.

    ``tokens`` (n,), ``parents`` (n,): an earlier node or -1, ``depths`` (n,): 1 for tokens right
    after the last known token, ``scores`` (n,): the draft's cumulative log-probability, at most 0.
    ``origins`` (n,) has bit i set if ``sources[i]`` proposed the node.

    Raises:
        ValueError: arrays of different lengths, a parent behind its child, two equal siblings, a
            score above its parent's, or one that is not a number.
    """

    tokens: Ints
    parents: Ints
    depths: Ints
    scores: npt.NDArray[np.float64]
    origins: npt.NDArray[np.uint8]
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        n = len(self.tokens)
        lengths = {len(a) for a in (self.parents, self.depths, self.scores, self.origins)}
        if lengths != {n}:
            raise ValueError(f"a tree's arrays have lengths {sorted({n, *lengths})}, not one")
        if not n:
            return
        parents = self.parents
        if (parents >= np.arange(n)).any() or parents.min() < ROOT:
            raise ValueError("a parent must come before its child")
        inner = parents != ROOT
        above = np.where(inner, self.depths[parents], 0)
        if (self.depths != above + 1).any():
            raise ValueError("a node's depth must be its parent's plus one")
        limit = np.where(inner, self.scores[parents], 0.0)
        if not (self.scores <= limit + _SLACK).all():
            raise ValueError("scores must be numbers that do not rise from parent to child")
        if len(set(zip(parents.tolist(), self.tokens.tolist(), strict=True))) != n:
            raise ValueError("two siblings have the same token")
        for array in (self.tokens, parents, self.depths, self.scores, self.origins):
            array.flags.writeable = False

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], source: str
    ) -> TokenTree:
        """Return a tree of one source; depths are computed from the parents."""
        depths = np.zeros(len(tokens), np.int64)
        for node, parent in enumerate(parents):
            depths[node] = depths[parent] + 1 if 0 <= parent < node else 1  # checked below
        return cls(
            np.array(tokens, np.int64),
            np.array(parents, np.int64),
            depths,
            np.array(scores, np.float64),
            np.ones(len(tokens), np.uint8),
            (source,),
        )

    @classmethod
    @cache
    def empty(cls) -> TokenTree:
        """Return a tree without nodes."""
        return cls.of([], [], [], "")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def height(self) -> int:
        """The depth of the deepest node; 0 for an empty tree."""
        return int(self.depths.max(initial=0))

    def mask(self) -> npt.NDArray[np.bool_]:
        """(n, n), True where the row's node sees the column's node: itself and its ancestors."""
        seen = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                seen[node] |= seen[parent]
        return seen

    def pass_mask(self) -> npt.NDArray[np.bool_]:
        """(1 + n, 1 + n): the mask of a pass whose first row is the last known token."""
        seen = np.zeros((1 + len(self), 1 + len(self)), np.bool_)
        seen[:, 0] = True
        seen[1:, 1:] = self.mask()
        return seen

    def positions(self, last: int) -> Ints:
        """Return (n,) rotary positions, with the last known token at ``last``."""
        return self.depths + last

    def children(self, node: int) -> Ints:
        """Return the nodes whose parent is ``node``; -1 is the last known token."""
        return np.flatnonzero(self.parents == node)

    def follow(self, node: int, token: int) -> int | None:
        """Return the child of ``node`` (-1: the last known token) with ``token``, if any."""
        for child in self.children(node).tolist():
            if self.tokens[child] == token:
                return int(child)
        return None

    def trim(self, budget: int, depth: int | None = None) -> TokenTree:
        """Return the best ``budget`` nodes (at most ``depth`` deep), in their present order."""
        deep = None if depth is None else self.depths <= depth
        if len(self) <= budget and (deep is None or deep.all()):
            return self
        # Parents come first among equals: a node is never kept without its parent.
        order = np.lexsort((np.arange(len(self)), self.depths, -self._falling()))
        if deep is not None:
            order = order[deep[order]]
        return self.take(np.sort(order[: max(budget, 0)]))

    def _falling(self) -> npt.NDArray[np.float64]:
        """Remove rounding errors from scores, so that none is above its parent's."""
        scores = self.scores.copy()
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT and scores[node] > scores[parent]:
                scores[node] = scores[parent]
        return scores

    def take(self, nodes: Ints) -> TokenTree:
        """Return the tree of these nodes, which must include their parents."""
        place = np.full(len(self) + 1, ROOT, np.int64)  # the last entry is the root's
        place[nodes] = np.arange(len(nodes))
        return TokenTree(
            self.tokens[nodes],
            place[self.parents[nodes]],
            self.depths[nodes],
            self.scores[nodes],
            self.origins[nodes],
            self.sources,
        )

    def proposed_by(self, node: int) -> tuple[str, ...]:
        """Return the sources that proposed a node."""
        bits = int(self.origins[node])
        return tuple(name for i, name in enumerate(self.sources) if bits >> i & 1)


def merge(trees: Iterable[TokenTree], budget: int) -> TokenTree:
    """Merge trees: equal paths become one, with the better score; the best ``budget`` nodes stay.

    Raises:
        ValueError: more than eight sources.
    """
    trees = [tree for tree in trees if len(tree)]
    if not trees:
        return TokenTree.empty()
    if len(trees) == 1:
        return trees[0].trim(budget)
    names = list(dict.fromkeys(name for tree in trees for name in tree.sources))
    if len(names) > 8:
        raise ValueError(f"a tree has at most 8 sources, not {len(names)}")
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    origins: list[int] = []
    at: dict[tuple[int, int], int] = {}
    for tree in trees:
        bit = [1 << names.index(name) for name in tree.sources]
        here: list[int] = []  # a node of ``tree`` in the merged one
        for node in range(len(tree)):
            old = int(tree.parents[node])
            parent = ROOT if old == ROOT else here[old]
            key = (parent, int(tree.tokens[node]))
            place = at.setdefault(key, len(tokens))
            if place == len(tokens):
                tokens.append(key[1])
                parents.append(parent)
                depths.append(int(tree.depths[node]))
                scores.append(-np.inf)
                origins.append(0)
            scores[place] = max(scores[place], float(tree.scores[node]))
            bits = int(tree.origins[node])
            origins[place] |= sum(b for i, b in enumerate(bit) if bits >> i & 1)
            here.append(place)
    merged = TokenTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.array(depths, np.int64),
        np.array(scores, np.float64),
        np.array(origins, np.uint8),
        tuple(names),
    )
    return merged.trim(budget)
