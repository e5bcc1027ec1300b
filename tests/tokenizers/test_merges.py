"""Merging is what the ``tokenizers`` package does with the same vocabulary and merges."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from localrt.common.errors import TokenizerError
from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers import tables
from localrt.models.tokenizers.tables import MergeTable, PieceTable

LETTERS = "abc漢"


def random_merges(rng: random.Random, count: int) -> tuple[list[str], list[str]]:
    """Pieces and merges in which the same piece is built in several ways, and some twice."""
    pieces, pairs = list(LETTERS), []
    for _ in range(count):
        left, right = rng.choice(pieces), rng.choice(pieces)
        if len(left + right) <= 9:
            pairs.append(f"{left} {right}")
            if left + right not in pieces:
                pieces.append(left + right)
    rng.shuffle(pairs)
    return pieces, pairs


def both(pieces: list[str], pairs: list[str]) -> tuple[MergeTable, models.BPE]:
    table = PieceTable(PackedStrings.of(pieces))
    vocab = {piece: token for token, piece in enumerate(pieces)}
    theirs = models.BPE(vocab, [tuple(pair.split(" ")) for pair in pairs])
    return MergeTable(table, PackedStrings.of(pairs)), theirs


@given(st.randoms(use_true_random=False), st.integers(0, 60))
def test_agrees_with_the_package(rng: random.Random, count: int) -> None:
    pieces, pairs = random_merges(rng, count)
    ours, theirs = both(pieces, pairs)
    for _ in range(8):
        word = "".join(rng.choices(LETTERS, k=rng.choice([0, 1, 2, 5, 20, 64, 65, 100, 300])))
        expected = [token.id for token in theirs.tokenize(word)]
        assert ours.merge([pieces.index(char) for char in word]) == expected


@given(st.randoms(use_true_random=False), st.integers(0, 60), st.integers(1, 5))
def test_blocks_of_any_size_agree(rng: random.Random, count: int, open_: int) -> None:
    pieces, pairs = random_merges(rng, count)
    ours, theirs = both(pieces, pairs)
    word = "".join(rng.choices(LETTERS, k=rng.choice([65, 100, 300])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_BLOCK", rng.choice([1, 2, 5, 30]))
        patch.setattr(tables, "_OPEN", open_)
        found = ours.merge([pieces.index(char) for char in word])
    assert found == [token.id for token in theirs.tokenize(word)]


@pytest.mark.parametrize("letters", ["a", "ab", LETTERS])
def test_a_word_of_100_000_characters_takes_no_quadratic_time(letters: str) -> None:
    rng = random.Random(1)
    pieces, pairs = random_merges(rng, 60)
    ours, theirs = both(pieces, pairs)
    word = "".join(rng.choices(letters, k=100_000))
    ids = [pieces.index(char) for char in word]
    begin = time.process_time()
    merged = ours.merge(ids)
    assert time.process_time() - begin < 20  # the square of it would take minutes
    assert merged == [token.id for token in theirs.tokenize(word)]


def test_a_merge_is_split_at_its_first_space() -> None:
    words = PieceTable(PackedStrings.of(["a", " b", "b ", "a b", "ab "]))
    table = MergeTable(words, PackedStrings.of(["a  b", "a b "]))
    assert [table.merge([0, 1]), table.merge([0, 2])] == [[3], [4]]


@pytest.mark.parametrize("merge", ["", "a", "a ", " a", " "])
def test_a_merge_without_two_sides_is_refused(merge: str) -> None:
    words = PieceTable(PackedStrings.of(["x", "y", "xy"]))
    with pytest.raises(TokenizerError, match=f"merge '{merge}' does not name two pieces"):
        MergeTable(words, PackedStrings.of(["x y", merge, "x y"]))


@pytest.mark.parametrize("sides", [["a", "c"], ["c", "b"], ["b", "a"]])
def test_a_merge_of_what_the_vocabulary_lacks_is_refused(sides: list[str]) -> None:
    words = PieceTable(PackedStrings.of(["a", "b", "ab"]))
    with pytest.raises(TokenizerError, match=f"merge of '{sides[0]}' and '{sides[1]}' needs"):
        MergeTable(words, PackedStrings.of(["a b", " ".join(sides)]))
