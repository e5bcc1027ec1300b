"""What guessing ahead is expected to bring: tokens per pass, by the guesses in it and their depth.

A draft's first choice is taken to come true with one probability at every position, its second
choice with that share of the rest, and so on; a tree of the likeliest nodes follows from that. It
knows neither models nor machines, and what it says is a forecast: the tuner measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

from localrt.errors import OptionError

__all__ = ["PRIOR_ACCEPTANCE", "GuessedTree", "check_acceptance", "guessed_tree"]

PRIOR_ACCEPTANCE = 0.7
"""Of a draft that nothing was measured of: what the tuner assumes as well."""

_MOST_DETOURS = 12


@dataclass(frozen=True, slots=True)
class GuessedTree:
    """``tokens`` that a pass brings, its own included, and the ``levels`` of the drafted tree."""

    guesses: int
    levels: int
    tokens: float


def check_acceptance(acceptance: float) -> float:
    """The share of first choices that come true.

    Raises:
        OptionError: not a share.
    """
    if not 0.0 <= acceptance <= 1.0:
        raise OptionError(f"acceptance must be from 0 to 1, is {acceptance}")
    return acceptance


@lru_cache(maxsize=4096)
def guessed_tree(acceptance: float, guesses: int, depth: int) -> GuessedTree:
    """The best tree of ``guesses`` nodes, at most ``depth`` deep.

    A node whose path takes ``n`` detours (choices after the first) on ``d`` levels comes true with
    probability ``p**d * (1 - p)**n``, and there are ``C(d - 1 + n, n)`` such nodes.
    """
    p = check_acceptance(acceptance)
    kinds = [
        (p**level * (1 - p) ** detours, level, comb(level - 1 + detours, detours))
        for level in range(1, depth + 1)
        for detours in range(_MOST_DETOURS)
    ]
    # Of equally likely nodes the higher ones: a parent comes before its children.
    kinds.sort(key=lambda kind: (-kind[0], kind[1]))
    left, levels, tokens = guesses, 0, 1.0
    for chance, level, count in kinds:
        taken = min(count, left)
        if not taken:
            break
        left -= taken
        levels = max(levels, level)
        tokens += taken * chance
    return GuessedTree(guesses, levels, tokens)
