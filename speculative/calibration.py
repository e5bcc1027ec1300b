"""How far a source's probabilities are to be believed, learnt from what the target confirms.

A guess is tested when the target has confirmed its parent. Guesses of about the same stated
probability are counted together, per source: how many were tested, how many came true. Old counts
fade, so that a source that has become better or worse is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localrt.speculative.tree import ROOT, TokenTree

__all__ = ["Calibration"]

_BINS = 12
_PRIOR = 4.0  # tests that the stated probability counts for
_FADE = 0.98  # of a bin's counts, per test in it


def _bin(conditional: float) -> int:
    """Bins of equal width in log-odds, which tell 0.9 from 0.99."""
    p = min(max(conditional, 1e-4), 1 - 1e-4)
    odds = math.log(p / (1 - p))
    return min(max(int((odds + 6) * _BINS / 12), 0), _BINS - 1)


class Calibration:
    """Of one source."""

    def __init__(self) -> None:
        self._tests = [0.0] * _BINS
        self._hits = [0.0] * _BINS

    def believed(self, conditional: float) -> float:
        """The probability that a guess comes true once its parent has."""
        key = _bin(conditional)
        return (self._hits[key] + _PRIOR * conditional) / (self._tests[key] + _PRIOR)

    def probabilities(self, tree: TokenTree) -> npt.NDArray[np.float64]:
        """(n,) that each node will be accepted. Children's sum to at most their parent's."""
        parents = tree.parents.tolist()
        own = [self.believed(c) for c in _conditionals(tree)]
        total: dict[int, float] = {}
        for parent, chance in zip(parents, own, strict=True):
            total[parent] = total.get(parent, 0.0) + chance
        result: list[float] = []
        for parent, chance in zip(parents, own, strict=True):
            above = 1.0 if parent == ROOT else result[parent]
            result.append(above * chance / max(1.0, total[parent]))
        return np.array(result, np.float64)

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """``path`` was accepted of ``tree`` (whose nodes were all verified)."""
        accepted = set(path)
        tested_under = {ROOT, *path}
        stated = _conditionals(tree)
        for node, parent in enumerate(tree.parents.tolist()):
            if parent in tested_under:
                key = _bin(stated[node])
                self._tests[key] = self._tests[key] * _FADE + 1
                self._hits[key] = self._hits[key] * _FADE + (node in accepted)


def _conditionals(tree: TokenTree) -> list[float]:
    """The stated probability of each node given its parent."""
    above = np.where(tree.parents == ROOT, 0.0, tree.scores[tree.parents])
    stated: list[float] = np.exp(np.minimum(tree.scores - above, 0.0)).tolist()
    return stated
