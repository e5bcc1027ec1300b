"""The guesses of several sources for one pass, in one tree, by what each has proved to be worth.

Sources state probabilities, which calibration makes comparable: the same guess of two sources is
one node, at the better chance. What the target confirms teaches each source about its own guesses
alone. It knows no costs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from localrt.speculative.tree import ROOT, TokenTree, merge
from localrt.speculative.worth import Calibration

_LEAST = 1e-9  # a chance whose logarithm is still a score


class MixedTree:
    """Empty until sources have proposed; emptied by ``clear``."""

    def __init__(self) -> None:
        self._proposed: dict[str, tuple[TokenTree, Calibration]] = {}

    def add(self, source: str, tree: TokenTree, calibration: Calibration) -> None:
        """What ``source`` proposes, in place of what it did before."""
        self._proposed[source] = tree, calibration

    def clear(self) -> None:
        """Nothing is proposed."""
        self._proposed.clear()

    def tree(self, most: int) -> TokenTree:
        """The ``most`` likeliest guesses of all; scores are logarithms of calibrated chances."""
        trees = [_calibrated(*pair) for pair in self._proposed.values() if len(pair[0])]
        if len(trees) < 2:
            return trees[0].trim(most) if trees else TokenTree.empty()
        return _shared(merge(trees, sum(map(len, trees)))).trim(most)

    def learn(self, tree: TokenTree, path: tuple[int, ...]) -> None:
        """``tree``, a part of what was proposed, was verified: ``path`` came true."""
        at = {(int(tree.parents[node]), int(tree.tokens[node])): node for node in range(len(tree))}
        for proposed, calibration in self._proposed.values():
            here: dict[int, int] = {ROOT: ROOT}  # a node of the proposal in the verified tree
            for node in range(len(proposed)):
                parent = here.get(int(proposed.parents[node]))
                if parent is None:
                    continue
                found = at.get((parent, int(proposed.tokens[node])))
                if found is not None:
                    here[node] = found
            del here[ROOT]
            if here:
                true = [i for i, node in enumerate(here.values()) if node in path]
                calibration.learn(proposed.take(np.array(list(here))), true)


def _shared(tree: TokenTree) -> TokenTree:
    """The same guesses, where the chances of siblings, of several sources, sum to one at most."""
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
    """The same guesses with the chances that are believed."""
    chances = np.maximum(calibration.probabilities(tree), _LEAST)
    return replace(tree, scores=np.log(chances))
