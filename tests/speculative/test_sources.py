"""Lookups: what they propose, how they rank it, and what they keep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import TreeSize
from tests.speculative.test_tree import words

TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_repeated_beginning() -> None:
    source = NgramSource()
    tree = source.propose([*TEXT, 20, 1, 2, 3], TreeSize(16, 4))
    path = words(tree)
    assert (4, 5, 6, 7) in path
    assert tree.height == 4
    assert (4, 5, 6, 7, 8) not in path


def test_nothing_repeated() -> None:
    assert len(NgramSource().propose(TEXT, TreeSize(16, 4))) == 0
    assert len(NgramSource().propose([1], TreeSize(16, 4))) == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 6))
def test_any_history(history: list[int], budget: int, depth: int) -> None:
    source = NgramSource()
    half = len(history) // 2
    if half:
        source.propose(history[:half], TreeSize(budget, depth))
    tree = source.propose(history, TreeSize(budget, depth))
    fresh = NgramSource().propose(history, TreeSize(budget, depth))
    assert words(tree) == words(fresh)  # step by step or at once
    assert len(tree) <= budget
    assert tree.height <= depth
    text = ",".join(map(str, history)) + ","
    for path in words(tree):
        assert ",".join(map(str, path)) + "," in text


def test_begin() -> None:
    source = NgramSource()
    source.propose([*TEXT, 1, 2, 3], TreeSize(8, 2))
    source.begin([9, 9, 9, 1, 2, 3])
    assert len(source.propose([9, 8, 7, 1, 2, 3], TreeSize(8, 2))) == 0


def test_archive() -> None:
    archive = Archive(most=40)
    archive.add(TEXT)
    tree = NgramSource(archive).propose([30, 3, 4, 5], TreeSize(8, 3))
    assert (6, 7, 8) in words(tree)
    assert tree.sources == ("archive",)
    for _ in range(10):
        archive.add(TEXT)
    assert len(archive) <= 40


def test_own_text_and_archive() -> None:
    archive = Archive()
    archive.add([1, 2, 3, 40, 50])
    tree = NgramSource(archive).propose([*TEXT, 1, 2, 3], TreeSize(8, 2))
    assert {(4, 5), (40, 50)} <= set(words(tree))
    assert set(tree.sources) == {"ngram", "archive"}
    assert len(NgramSource(archive).propose([*TEXT, 1, 2, 3], TreeSize(3, 2))) == 3
