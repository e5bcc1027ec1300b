"""Joins the proposals of several sources in one tree.

Calibration makes the sources' probabilities comparable: a token from two sources is one node, with
the better probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localrt.speculative.cost_model import Calibration
from localrt.speculative.tree import ROOT, TokenTree, merge

_LEAST = 1e-9  # the least probability, so that its logarithm is a valid score


class MixedTree:
    """One tree of several sources' proposals. Empty at first; emptied by ``clear``."""

    def __init__(self) -> None:
        self._proposed: dict[str, tuple[TokenTree, Calibration]] = {}

    def add(self, source: str, tree: TokenTree, calibration: Calibration) -> None:
        """Set the proposal of ``source``, replacing its earlier one."""
        self._proposed[source] = tree, calibration

    def clear(self) -> None:
        """Remove all proposals."""
        self._proposed.clear()

    def tree(self, most: int) -> TokenTree:
        """Return the ``most`` likeliest nodes, scored by log of calibrated probability."""
        trees = [_calibrated(*pair) for pair in self._proposed.values() if len(pair[0])]
        if len(trees) < 2:
            return trees[0].trim(most) if trees else TokenTree.empty()
        return _shared(merge(trees, sum(map(len, trees)))).trim(most)

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn that ``path`` was accepted of ``tree``, the verified part of the proposals."""
        at = {(int(tree.parents[node]), int(tree.tokens[node])): node for node in range(len(tree))}
        for proposed, calibration in self._proposed.values():
            here: dict[int, int] = {ROOT: ROOT}  # node of the proposal -> node of the verified tree
            for node in range(len(proposed)):
                parent = here.get(int(proposed.parents[node]))
                if parent is None:
                    continue
                found = at.get((parent, int(proposed.tokens[node])))
                if found is not None:
                    here[node] = found
            del here[ROOT]
            if here:
                accepted = [i for i, node in enumerate(here.values()) if node in path]
                calibration.learn(proposed.take(np.array(list(here))), accepted)


def _shared(tree: TokenTree) -> TokenTree:
    """Return the same nodes, with probabilities of siblings that sum to at most one."""
    inner = tree.parents != ROOT
    own = np.exp(tree.scores - np.where(inner, tree.scores[tree.parents], 0.0))
    total = np.bincount(tree.parents + 1, own, minlength=len(tree) + 1)
    own /= np.maximum(total[tree.parents + 1], 1.0)
    scores = np.log(np.maximum(own, _LEAST))
    for node, parent in enumerate(tree.parents.tolist()):
        if parent != ROOT:
            scores[node] += scores[parent]
    return replace(tree, scores=scores)


def _calibrated(tree: TokenTree, calibration: Calibration) -> TokenTree:
    """Return the same nodes with calibrated probabilities."""
    chances = np.maximum(calibration.probabilities(tree), _LEAST)
    return replace(tree, scores=np.log(chances))
