"""What is known of one source of guesses: what its trees cost, and how much of them comes true.

Gains of trees that were not tried follow from smaller ones, as if a tree were a chain. It decides
nothing; see ``tuner.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from localrt.speculative.calibration import Calibration
from localrt.speculative.costs import DraftCost
from localrt.speculative.policy import Plan
from localrt.speculative.tree import TokenTree

__all__ = ["BUDGETS", "DEPTHS", "FIRST_WAIT", "Source", "node_counts"]

BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEPTHS = (1, 2, 4, 8, 16)
FIRST_WAIT = 4
"""Steps until the next attempt, after one that was not expected to pay."""

_BLEND = 0.2  # of a new measurement in a running mean
_PRIOR_CHANCE = 0.7  # of a source's guess coming true, before its first tree


@dataclass(slots=True)
class Source:
    """What is known of one source."""

    cheap: bool
    level: float  # of a plain step that a level of its draft is taken to cost, before one was made
    cost: DraftCost = field(default_factory=DraftCost)
    calibration: Calibration = field(default_factory=Calibration)
    gains: dict[tuple[int, int], float] = field(default_factory=dict)
    row_s: float | None = None  # of a token that it computes to catch up
    wait: int = 0  # steps until an attempt that is not expected to pay
    next_wait: int = FIRST_WAIT

    def gain(self, budget: int, depth: int) -> float:
        """Guesses of a tree that come true."""
        known = self.gains.get((budget, depth))
        if known is not None:
            return known
        # From the largest smaller tree, as if it were a chain; with nothing known, from the start.
        smaller = [(b, d) for b, d in self.gains if b <= budget and d <= depth]
        chance = _PRIOR_CHANCE
        if smaller:
            b, d = max(smaller)
            chance = _chance(self.gains[b, d], d)
        return _chain(chance, min(depth, budget))

    def note_tree(self, tree: TokenTree, plan: Plan) -> None:
        """What trees of this and of smaller budgets and depths would have brought."""
        chances = self.calibration.probabilities(tree)
        order = np.lexsort((np.arange(len(tree)), -tree.scores))
        for depth in DEPTHS:
            if depth > plan.depth:
                break
            deep = order[tree.depths[order] <= depth]
            sums = np.concatenate([[0.0], np.cumsum(chances[deep])])
            for budget in BUDGETS:
                if budget > plan.budget:
                    break
                new = float(sums[min(budget, len(deep))])
                old = self.gains.get((budget, depth))
                self.gains[budget, depth] = new if old is None else old + _BLEND * (new - old)


def _chain(chance: float, levels: int) -> float:
    """Guesses of a chain that come true, if each does with the same chance."""
    return sum(chance**level for level in range(1, levels + 1))


def _chance(gain: float, levels: int) -> float:
    """The chance that makes a chain of ``levels`` bring ``gain``."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if _chain(middle, levels) < gain else (low, middle)
    return (low + high) / 2


def node_counts(most: int) -> list[int]:
    """Numbers of nodes to consider: all of few, then in steps."""
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count = max(count + 1, count * 9 // 8)
    return [*counts, most] if most else []
