"""What guessing is expected to bring: the best tree of so many nodes, found by growing it."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.offload.planner.pair import guessed_tree

SHARES = st.floats(0.05, 0.95)


def grown(p: float, guesses: int, depth: int) -> float:
    """Best-first: the likeliest node there is, with its first child and its next sibling."""
    waiting = [(-p, 1)]
    tokens = 1.0
    for _ in range(guesses):
        chance, level = heapq.heappop(waiting)
        tokens -= chance
        heapq.heappush(waiting, (chance * (1 - p), level))
        if level < depth:
            heapq.heappush(waiting, (chance * p, level + 1))
    return tokens


@given(p=SHARES, guesses=st.integers(1, 12), depth=st.integers(1, 8))
def test_it_is_the_tree_that_grows_best_first(p: float, guesses: int, depth: int) -> None:
    tree = guessed_tree(p, guesses, depth)
    assert tree.tokens == pytest.approx(grown(p, guesses, depth))
    assert 1 <= tree.levels <= min(guesses, depth)


@given(p=SHARES, guesses=st.integers(1, 60), depth=st.integers(1, 15))
def test_more_guesses_levels_and_acceptance_never_bring_less(
    p: float, guesses: int, depth: int
) -> None:
    here = guessed_tree(p, guesses, depth).tokens
    assert 1 < here <= 1 + depth
    assert guessed_tree(p, guesses + 1, depth).tokens >= here - 1e-9
    assert guessed_tree(p, guesses, depth + 1).tokens >= here - 1e-9


def test_certain_and_hopeless_drafts() -> None:
    assert guessed_tree(1.0, 8, 8).tokens == 9
    assert guessed_tree(0.0, 8, 8).tokens == 1
