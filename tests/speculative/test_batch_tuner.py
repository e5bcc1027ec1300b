"""Drafts of sequences that share passes: the likeliest of all, where they pay, within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.speculative.batch_tuner import BatchTuner
from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import TOLERANCE, Tuner


@cache
def chain(chance: float, size: int) -> TokenTree:
    scores = [math.log(chance) * (i + 1) for i in range(size)]
    return TokenTree.of(list(range(size)), list(range(-1, size - 1)), scores, "ngram")


def batch_tuner(sequences: int, pass_s: Callable[[int], float], measured: int = 64) -> BatchTuner:
    tuner = Tuner({"ngram": 0.0})
    for rows in range(sequences, measured + 1):
        for _ in range(3):
            tuner.cost.add(rows, pass_s(rows))
    found = BatchTuner(tuner)
    assert found.should_draft(sequences)
    return found


def flat(rows: int) -> float:
    """The disk takes the time."""
    return 0.06 + 1e-5 * rows


def bound(rows: int) -> float:
    """Every row takes as long as the first."""
    return 0.01 * rows


trees = st.lists(
    st.builds(chain, st.floats(0.01, 1.0), st.integers(0, 12)), min_size=2, max_size=12
)


@given(trees=trees, room=st.integers(0, 60))
def test_choose(trees: list[TokenTree], room: int) -> None:
    chosen = batch_tuner(len(trees), flat).choose(trees, room)
    assert len(chosen) == len(trees)
    assert sum(map(len, chosen)) <= room
    kept = [score for tree in chosen for score in tree.scores]
    for whole, part in zip(trees, chosen, strict=True):
        assert part.tokens.tolist() == whole.tokens[: len(part)].tolist()
        left = whole.scores[len(part) :]
        if kept and len(left):
            assert left.max() <= min(kept) + 1e-9


def test_cost_of_rows() -> None:
    likely = [chain(0.9, 4)] * 8
    assert [len(tree) for tree in batch_tuner(8, flat).choose(likely, 100)] == [4] * 8
    assert sum(map(len, batch_tuner(8, bound).choose([chain(0.6, 4)] * 8, 100))) <= 8


def test_surest_sequences() -> None:
    def dear(rows: int) -> float:
        return 0.06 + 0.004 * max(0, rows - 8)

    chosen = batch_tuner(8, dear).choose([chain(0.95, 6)] * 2 + [chain(0.3, 6)] * 6, 100)
    assert [len(tree) for tree in chosen] == [6, 6, 0, 0, 0, 0, 0, 0]


def test_unmeasured_pass() -> None:
    tuner = Tuner({"ngram": 0.0})
    found = BatchTuner(tuner)
    assert not found.should_draft(4)
    found.choose([TokenTree.empty()] * 4, 10)
    found.passed(0, 4, 0.05, 0.0)
    assert found.should_draft(4)
    assert found.should_draft(3)  # no dearer
    assert not found.should_draft(5)


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.5, 0.95])
@pytest.mark.parametrize("cost", [flat, bound])
def test_gain(chance: float, cost: Callable[[int], float]) -> None:
    """Sources claim 0.8, whatever is true."""
    rng = np.random.default_rng(3)
    tuner = Tuner({"ngram": 0.0})
    found, acceptance = BatchTuner(tuner), tuner.sources["ngram"].acceptance
    spent = plain = 0.0
    for _ in range(600):
        claimed = chain(0.8, 8)
        drafts = [acceptance.rescored(claimed)] * 6
        ready = found.should_draft(6)
        chosen = found.choose(drafts if ready else [TokenTree.empty()] * 6, 200)
        emitted = 0
        for tree in chosen:
            path = 0
            while path < len(tree) and rng.random() < chance:
                path += 1
            emitted += 1 + path
            if len(tree):
                for level in range(min(path + 1, len(tree))):
                    acceptance.tested(0.8, accepted=level < path)
        rows = 6 + sum(map(len, chosen))
        seconds = cost(rows)
        found.passed(rows - 6, emitted, seconds, 0.0)
        spent += seconds
        plain += cost(6) * emitted / 6
    assert spent < plain * (1 + 2 * TOLERANCE)
    if chance > 0.9 and cost is flat:
        assert plain > 4 * spent
