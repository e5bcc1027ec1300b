"""Trees: order, masks, trimming and merging."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.speculative.tree import ROOT, TokenTree, merge


@st.composite
def trees(draw: st.DrawFn, name: str = "a") -> TokenTree:
    size = draw(st.integers(0, 25))
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for node in range(size):
        parent = draw(st.integers(-1, node - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        token = draw(st.integers(0, 40).filter(lambda t, taken=taken: t not in taken))
        above = 0.0 if parent == ROOT else scores[parent]
        tokens.append(token)
        parents.append(parent)
        scores.append(above - draw(st.floats(0, 5)))
    return TokenTree.of(tokens, parents, scores, name)


def path_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The nodes from the first level down to ``node``; none for the last known token."""
    nodes: list[int] = []
    while node != ROOT:
        nodes.insert(0, node)
        node = int(tree.parents[node])
    return tuple(nodes)


def words(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Every node by the tokens that lead to it."""
    return {
        tuple(tree.tokens[list(path_to(tree, node))].tolist()): float(tree.scores[node])
        for node in range(len(tree))
    }


@settings(max_examples=30)
@given(trees())
def test_mask(tree: TokenTree) -> None:
    mask = tree.mask()
    for node in range(len(tree)):
        assert tuple(np.flatnonzero(mask[node])) == path_to(tree, node)
        assert tree.depths[node] == len(path_to(tree, node))
        assert all(tree.parents[child] == node for child in tree.children(node))
    whole = tree.pass_mask()
    assert whole[:, 0].all()
    assert not whole[0, 1:].any()
    assert (whole[1:, 1:] == mask).all()
    assert (tree.positions(7) == tree.depths + 7).all()


@settings(max_examples=30)
@given(trees(), st.integers(0, 30), st.integers(1, 6))
def test_trim(tree: TokenTree, budget: int, depth: int) -> None:
    kept = tree.trim(budget, depth)
    before, after = words(tree), words(kept)
    possible = [score for path, score in before.items() if len(path) <= depth]
    assert len(kept) == min(budget, len(possible))
    assert all(before[path] == score for path, score in after.items())
    assert all(len(path) == 1 or path[:-1] in after for path in after)
    best = sorted(possible, reverse=True)[: len(kept)]
    assert sorted(after.values(), reverse=True) == best


@settings(max_examples=30)
@given(trees("a"), trees("b"), st.integers(0, 60))
def test_merge(a: TokenTree, b: TokenTree, budget: int) -> None:
    both, one, other = merge([a, b], budget), words(a), words(b)
    found = words(both)
    assert len(found) == len(both) == min(budget, len(one | other))
    for path, score in found.items():
        assert score == max(one.get(path, -np.inf), other.get(path, -np.inf))
        node = list(found).index(path)
        names = {n for n, t in (("a", one), ("b", other)) if path in t}
        assert set(both.proposed_by(node)) == names


def test_bad_trees() -> None:
    for tokens, parents, scores in (
        ([1, 2], [1, ROOT], [0, 0]),
        ([1, 1], [ROOT, ROOT], [0, 0]),
        ([1, 2], [ROOT, 0], [-1, -0.5]),
        ([1], [-2], [0]),
        ([1], [ROOT], [float("nan")]),
    ):
        with pytest.raises(ValueError):
            TokenTree.of(tokens, parents, scores, "x")


def test_immutable() -> None:
    tree = TokenTree.of([1], [ROOT], [0], "x")
    with pytest.raises(ValueError):
        tree.tokens[0] = 2
