"""What is known of one source of guesses: what its trees cost, and how much of them comes true.

Gains of trees that were not tried follow from smaller ones, as if a tree were a chain. It decides
nothing; see ``tuner.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from localrt.speculative.calibration import Calibration
from localrt.speculative.costs import DraftCost, Retry
from localrt.speculative.plan import Plan
from localrt.speculative.tree import TokenTree

__all__ = ["BUDGETS", "DEPTHS", "MARGIN", "Source", "nodes_worth"]

BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEPTHS = (1, 2, 4, 8, 16)
MARGIN = 1.02
"""What is expected must be better than plain decoding by this much."""

_BLEND = 0.2  # of a new measurement in a running mean
_PRIOR_CHANCE = 0.7  # of a source's guess coming true, before its first tree


@dataclass(slots=True)
class Source:
    """What is known of one source."""

    level: float  # of a plain step that a level of its draft is taken to cost, before one was made
    cost: DraftCost = field(default_factory=DraftCost)
    calibration: Calibration = field(default_factory=Calibration)
    gains: dict[tuple[int, int], float] = field(default_factory=dict)
    row_s: float | None = None  # of a token that it computes to catch up
    retry: Retry = field(default_factory=Retry)  # of attempts that are not expected to pay

    @property
    def cheap(self) -> bool:
        """Whether its guesses cost next to nothing: those of lookups."""
        return self.level == 0

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
        for depth in (depth for depth in DEPTHS if depth <= plan.depth):
            deep = order[tree.depths[order] <= depth]
            sums = np.concatenate([[0.0], np.cumsum(chances[deep])])
            for budget in (budget for budget in BUDGETS if budget <= plan.budget):
                new = float(sums[min(budget, len(deep))])
                old = self.gains.get((budget, depth), new)
                self.gains[budget, depth] = old + _BLEND * (new - old)


def _chain(chance: float, levels: int) -> float:
    """Guesses of a chain that come true, if each does with the same chance."""
    return sum(chance**level for level in range(1, levels + 1))


@lru_cache(maxsize=64)  # of many sizes, from the same few
def _chance(gain: float, levels: int) -> float:
    """The chance that makes a chain of ``levels`` bring ``gain``."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if _chain(middle, levels) < gain else (low, middle)
    return (low + high) / 2


def nodes_worth(
    sums: npt.NDArray[np.float64],
    token_s: float,
    longer_s: Callable[[int], float],
    affordable: Callable[[int], bool],
) -> int:
    """How many of the likeliest nodes to verify, which together bring ``sums`` tokens.

    As many as bring more tokens than their rows cost time: a token is worth ``token_s``, and so
    many nodes make the pass ``longer_s``. Where one number is not ``affordable``, no larger one is.
    """
    best, best_value = 0, 0.0
    count, most = 1, len(sums)
    while count <= most and affordable(count):
        value = float(sums[count - 1]) - MARGIN * longer_s(count) / token_s
        if value > best_value:
            best, best_value = count, value
        # All small numbers, then steps, and the whole tree.
        count = count + 1 if count == most else min(max(count + 1, count * 9 // 8), most)
    return best
