"""Trees that are gone on with: beyond their budget, and below the node that came true."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.speculative.best_first import Children, Growth, likeliest
from localrt.speculative.tree import ROOT, TokenTree
from tests.speculative.test_tree import words

VOCAB = 5


def model(path: tuple[int, ...]) -> np.ndarray:
    """A random language model of five tokens, any of which is likely enough to be kept."""
    return np.random.default_rng([3, *path]).normal(size=VOCAB).astype(np.float32)


class Expander:
    """Expands by ``model``, behind ``prefix``, and remembers what it was asked for."""

    def __init__(self, prefix: Sequence[int] = ()) -> None:
        self._known: dict[int, tuple[int, ...]] = {ROOT: tuple(prefix)}
        self.rounds: list[list[tuple[int, ...]]] = []
        self.fails = False

    def __call__(self, nodes: Any, least: Any) -> list[Children]:
        if self.fails:
            raise RuntimeError("given up")
        self.rounds.append([])
        found = []
        for (node, token, parent), low in zip(nodes, least, strict=True):
            if node != ROOT:
                self._known[node] = (*self._known[parent], token)
            self.rounds[-1].append(self._known[node])
            found.append(likeliest(model(self._known[node]), low))
        return found

    def renumber(self, top: Sequence[int], number: dict[int, int]) -> None:
        known = {new: self._known[old] for old, new in number.items() if old in self._known}
        self._known = {**known, ROOT: tuple(top)}


def fresh(budget: int, depth: int, prefix: Sequence[int] = ()) -> dict[tuple[int, ...], float]:
    return words(Growth("x").grow(Expander(prefix), budget=budget, depth=depth))


def same(tree: TokenTree, other: dict[tuple[int, ...], float]) -> None:
    ours = words(tree)
    assert set(ours) == set(other)
    assert all(ours[path] == pytest.approx(other[path], abs=1e-9) for path in ours)


@settings(max_examples=30)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["grow", "reach", "fail"]), st.integers(1, 30), st.integers(1, 5)
        ),
        max_size=6,
    ),
    budget=st.integers(1, 40),
    depth=st.integers(1, 5),
)
def test_a_tree_does_not_depend_on_how_it_grew(
    steps: list[tuple[str, int, int]], budget: int, depth: int
) -> None:
    growth, expand = Growth("x"), Expander()
    for what, count, deep in steps:
        if what == "grow":
            same(growth.grow(expand, budget=count, depth=deep), fresh(count, deep))
        elif what == "reach":
            growth.reach(expand, nodes=count, depth=deep)
        else:
            expand.fails = True
            with pytest.raises(RuntimeError):
                growth.reach(expand, nodes=count, depth=99)
            expand.fails = False
    same(growth.grow(expand, budget=budget, depth=depth), fresh(budget, depth))
    asked = [path for batch in expand.rounds for path in batch]
    assert len(asked) == len(set(asked))  # nothing is computed twice


@settings(max_examples=30)
@given(
    first=st.tuples(st.integers(1, 30), st.integers(1, 4)),
    rounds=st.lists(st.integers(1, 8), max_size=5),
    choice=st.integers(0, 1000),
    then=st.tuples(st.integers(1, 30), st.integers(1, 4)),
)
def test_what_lies_below_a_node_is_a_tree(
    first: tuple[int, int], rounds: list[int], choice: int, then: tuple[int, int]
) -> None:
    growth, expand = Growth("x"), Expander()
    tree = growth.grow(expand, budget=first[0], depth=first[1])
    for nodes in rounds:
        growth.reach(expand, nodes=nodes, depth=6)
    paths = sorted(words(tree))
    path = paths[choice % len(paths)]
    top = growth.walk(path)
    assert len(top) == len(path)
    below, number = growth.below(top[-1])
    assert below.levels() == growth.levels(top[-1])
    expand.renumber(path, number)
    before = [p for batch in expand.rounds for p in batch]
    expand.rounds.clear()
    same(below.grow(expand, budget=then[0], depth=then[1]), fresh(*then, prefix=path))
    again = [p for batch in expand.rounds for p in batch if p in before]
    assert not again


def test_reaching_goes_on_below_the_likeliest_leaf() -> None:
    """What is sure is followed down, a level a round."""
    sure = Children(np.array([1]), np.array([-0.01]))
    unsure = Children(np.array([2, 3]), np.array([math.log(0.4), math.log(0.3)]))
    asked: list[int] = []

    def expand(nodes: Any, least: Any) -> list[Children]:
        asked.append(len(nodes))
        assert min(least) <= -7  # what is good enough for later is not cut off
        return [unsure if node == ROOT else sure for node, _, _ in nodes]

    growth = Growth("x")
    growth.grow(expand, budget=2, depth=2)
    for _ in range(6):
        growth.reach(expand, nodes=2, depth=20)
    best = growth.walk([2, *[1] * 9])
    assert growth.levels() == 1 + len(best)  # and the root
    assert len(best) >= 6
    assert len(growth.walk([3, *[1] * 9])) >= 5
    assert max(asked) <= 2
    assert growth.reach(expand, nodes=2, depth=1) == 0  # all that is left lies deeper
    assert growth.walk([7]) == []
