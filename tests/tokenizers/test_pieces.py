"""The table of pieces finds what a dictionary finds."""

import random

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.tables import PieceTable

any_text = st.text(st.characters(codec=None), max_size=4) | st.sampled_from(["", "a", "\0", "\0\0"])


def find_many(table: PieceTable, texts: list[str]) -> list[int]:
    packed = PackedStrings.of(texts)
    offsets = packed.offsets.astype(np.int64)
    data = np.frombuffer(packed.data, np.uint8)
    found: list[int] = table.find_many(data, offsets[:-1], np.diff(offsets)).tolist()
    return found


@given(st.lists(any_text, max_size=30), st.lists(any_text, max_size=10), st.randoms())
@example(["a", "a"], ["a"], random.Random(0))
@example([], [""], random.Random(0))
def test_finds_as_a_dictionary_does(
    pieces: list[str], others: list[str], rng: random.Random
) -> None:
    table = PieceTable(PackedStrings.of(pieces))
    members = np.array([rng.random() < 0.7 for _ in pieces], np.bool_)
    among = {piece: token for token, piece in enumerate(pieces)}
    chosen = {piece: token for token, piece in enumerate(pieces) if members[token]}
    for found, expected in ((table, among), (table.only(members), chosen)):
        asked = pieces + others
        assert [found.find(text) for text in asked] == [expected.get(text) for text in asked]
        assert find_many(found, asked) == [expected.get(text, -1) for text in asked]
    texts = [piece.encode("utf-8", "surrogatepass").decode(errors="replace") for piece in pieces]
    assert [table.text(token) for token in range(-1, len(pieces) + 1)] == ["", *texts, ""]


def test_a_large_vocabulary_with_long_pieces_that_begin_alike() -> None:
    rng = random.Random(3)
    pieces = ["".join(rng.choices("abĠ漢", k=rng.randint(1, 12))) for _ in range(40_000)]
    pieces += ["Ġ" * length for length in range(1, 200)] + ["=" * 200 + end for end in "abc"]
    among = {piece: token for token, piece in enumerate(pieces)}
    table = PieceTable(PackedStrings.of(pieces))
    asked = [*among, "Ġ" * 300, "=" * 200, "=" * 200 + "d"]
    assert find_many(table, asked) == [among.get(text, -1) for text in asked]
    assert [table.find(text) for text in asked] == [among.get(text) for text in asked]
