"""Draft sources. Lookups: what they propose and keep. A draft model's tree: best-first, batched,
and the same however its cache was filled.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localrt.common.errors import CancelledError
from localrt.quant.ops.protocol import Batch
from localrt.speculative.best_first import DECAY, Children, Growth, likeliest
from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import DraftFailedError, TreeSize
from localrt.speculative.tree_source import TreeSource
from tests.models.tiny import load_ours, save_tiny, tokens
from tests.speculative.sources import model_source
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


VOCAB = 5


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return np.asarray(row - row.max() - math.log(np.exp(row - row.max()).sum()))


def model(path: tuple[int, ...]) -> np.ndarray:
    """A random language model of five tokens."""
    return np.random.default_rng(hash((3, *path)) & 0xFFFF).normal(size=VOCAB).astype(np.float32)


@cache
def exact_scores(depth: int) -> dict[tuple[int, ...], float]:
    """Of every path of so many tokens at most."""
    exact = {(): 0.0}
    for path in (p for n in range(depth) for p in itertools.product(range(VOCAB), repeat=n)):
        for token, logprob in enumerate(log_softmax(model(path))):
            exact[*path, token] = exact[path] + logprob + DECAY
    del exact[()]
    return exact


@pytest.mark.parametrize("budget", [1, 4, 16, 60])
@pytest.mark.parametrize("round_nodes", [1, 3, 128])
def test_best_nodes(budget: int, round_nodes: int) -> None:
    depth, known, calls = 4, {-1: ()}, []

    def expand(nodes: Any, least: Any) -> list[Children]:
        calls.append(len(nodes))
        found = []
        for (node, token, parent), low in zip(nodes, least, strict=True):
            if node != -1:
                known[node] = (*known[parent], token)
            found.append(likeliest(model(known[node]), low))
        return found

    tree = Growth("x").grow(expand, budget=budget, depth=depth, round_nodes=round_nodes)
    exact = exact_scores(depth)
    best = sorted(exact.values(), reverse=True)[:budget]
    assert sorted(tree.scores.tolist(), reverse=True) == pytest.approx(best, abs=1e-5)
    for path, score in words(tree).items():
        assert score == pytest.approx(exact[path], abs=1e-5)
    assert calls[0] == 1
    assert max(calls) <= max(round_nodes, 1)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder)
    return load_ours(folder)


def source(decoder: Any, **options: Any) -> TreeSource:
    return model_source(decoder, **{"capacity": 200, **options})


def test_scores(decoder: Any) -> None:
    history = tokens(20)
    tree = source(decoder).propose(history, TreeSize(24, 4))
    assert len(tree) == 24
    for path, score in list(words(tree).items())[::3]:
        rows = decoder.forward(Batch.extend([(decoder.cache(64), [*history, *path])]))
        exact = sum(log_softmax(rows[len(history) - 1 + i])[t] + DECAY for i, t in enumerate(path))
        assert score == pytest.approx(exact, abs=1e-3)


def test_levels_that_are_not_likely_enough(decoder: Any) -> None:
    history = tokens(20)
    kept = source(decoder)
    whole = words(source(decoder).propose(history, TreeSize(100, 4)))
    least = float(np.exp(max(score for path, score in whole.items() if len(path) == 2)))
    some = words(kept.propose(history, TreeSize(100, 4, 1.0)))
    assert {len(path) for path in some} == {1}
    assert kept.passes == 1
    # What was left out is drafted as soon as it is asked for.
    for each in (kept, source(decoder)):
        deeper = words(each.propose(history, TreeSize(100, 4, least)))
        assert max(map(len, deeper)) > 1
        assert set(words(each.propose(history, TreeSize(100, 4)))) == set(whole)


def never() -> None:
    return None


def prepare(kept: TreeSource, history: list[int], nodes: int) -> None:
    kept.ahead(history, nodes, check=never, outcome=never)


def test_drafted_ahead(decoder: Any) -> None:
    kept = source(decoder)
    history = tokens(20)
    for step in range(5):
        tree = kept.propose(history, TreeSize(12, 3))
        prepare(kept, history, 4 * step)
        fresh = source(decoder).propose(history, TreeSize(30, 4))
        path = max(words(fresh), key=lambda p: (words(fresh)[p], len(p)))  # the likeliest
        history = [*history, *path]
        passes, ready = kept.passes, kept.ready(history)
        tree = kept.propose(history, TreeSize(12, 3))
        # A level that is there costs no pass; without any, the history costs one itself.
        assert kept.passes - passes <= 3
        assert (kept.passes - passes < 3) == (ready > 0)
        theirs, ours = words(source(decoder).propose(history, TreeSize(12, 3))), words(tree)
        assert set(ours) == set(theirs)
        assert all(ours[p] == pytest.approx(theirs[p], abs=1e-3) for p in ours)
    assert step > 0


@settings(max_examples=12)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["propose", "ahead", "cancel"]),
            st.integers(0, 12),  # the check at which it is cancelled, or what is asked for
            st.integers(0, 100),  # which path comes true
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )
)
@example(  # a round of one node, which must not see its siblings
    steps=[
        ("propose", 0, 1, True),
        ("propose", 0, 1, False),
        ("propose", 0, 9, False),
        ("ahead", 1, 0, False),
    ]
)
def test_cancelled_anywhere(decoder: Any, steps: list[tuple[str, int, int, bool]]) -> None:
    """Whatever was prepared, given up or missed: the next tree is that of a new source."""
    kept = source(decoder)
    history = tokens(12)
    for what, number, choice, known in steps:
        left = number

        def check() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CancelledError("given up")

        try:
            if what == "propose":
                kept.propose(history, TreeSize(1 + number, 3))
            elif what == "ahead":
                kept.propose(history, TreeSize(6, 2))
                prepare(kept, history, number)
            else:
                kept.propose(history, TreeSize(6, 2))
                kept.ahead(history, 20, check=check, outcome=never)
                kept.propose(history, TreeSize(20, 5), check=check)
        except CancelledError:
            pass
        paths = sorted(words(source(decoder).propose(history, TreeSize(10, 3))))
        new = list(paths[choice % len(paths)])
        history = [*history, *new] if known else [*history, *new[:1], 3, 4]
    ours, theirs = (words(s.propose(history, TreeSize(8, 3))) for s in (kept, source(decoder)))
    assert set(ours) == set(theirs)
    assert all(ours[p] == pytest.approx(theirs[p], abs=1e-3) for p in ours)


def test_end_of_context(decoder: Any) -> None:
    small = source(decoder, capacity=32)
    assert len(small.propose(tokens(32), TreeSize(8, 4))) == 0
    tree = small.propose(tokens(30), TreeSize(16, 8))
    assert len(tree) > 0
    assert tree.height <= 3


def test_nan_draft(decoder: Any) -> None:
    class Broken:
        cache = decoder.cache

        def forward(self, batch: Any, **options: Any) -> Any:
            return decoder.forward(batch, **options) * np.float32("nan")

    with pytest.raises(DraftFailedError, match="NaN logits"):
        source(Broken()).propose(tokens(5), TreeSize(8, 2))


def approx_words(tree: Any) -> Any:
    """torch sums in another order for other numbers of rows."""
    return pytest.approx(words(tree), abs=1e-4)


def test_prompt_in_pieces(decoder: Any) -> None:
    history, looks = tokens(100), iter([None, None, [], None, None, None, None])
    draft, fresh = source(decoder), source(decoder)
    assert draft.missing(history) == 100
    draft.ahead(history, 0, check=lambda: None, outcome=lambda: next(looks))
    assert draft.missing(history) == 100 - 64, "two pieces, then the pass had ended"
    draft.ahead(history, 0, check=lambda: None, outcome=lambda: None)
    assert draft.missing(history) == 0
    before = draft.passes
    assert words(draft.propose(history, TreeSize(8, 2))) == approx_words(
        fresh.propose(history, TreeSize(8, 2))
    )
    assert draft.passes - before <= 3  # the last token, and two levels at most
