"""An answer in two parts, piece by piece: the same parts as of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt import split_thinking
from localrt.chat_format.thinking import Piece, ThoughtStream, parted

_PIECES = ["<think>", "</think>", "<thinking>", "</thinking>", "<thi", "a ", "b", " ", "\n", "<"]


def streamed(pieces: list[str]) -> list[Piece]:
    stream = ThoughtStream()
    return [stream.push(piece) for piece in pieces] + [stream.push("", last=True)]


def test_thoughts_and_text_are_told_apart_as_they_come() -> None:
    found = streamed(["<thi", "nk>\nHm, ", "two", "\n</th", "ink>\n\n", "Four", ". <think>"])
    thoughts = [piece.thinking for piece in found if piece.thinking]
    assert thoughts == ["Hm,", " two"]
    assert [piece.text for piece in found if piece.text] == ["Four", ". <think>"]


@pytest.mark.parametrize("text", ["Hello", " spaced", "<b>bold</b>", "<", "a</think>b"])
def test_an_answer_without_thinking_stays_as_it_is(text: str) -> None:
    assert parted(text) == Piece("", text)


@given(st.lists(st.sampled_from(_PIECES), max_size=8), st.integers(1, 4))
def test_pieces_join_to_the_parts_of_the_whole(parts: list[str], size: int) -> None:
    text = "<think>" + "".join(parts)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = streamed(pieces)
    whole = split_thinking(text)
    assert "".join(piece.thinking for piece in found) == whole.thinking
    answer = "".join(piece.text for piece in found)
    assert answer == whole.answer or (not whole.answer and "<thinking>".startswith(answer))
