"""Text that arrives token by token equals the text decoded at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.models.tokenizers.base import Detokenizer

pieces = st.lists(
    st.one_of(
        st.binary(max_size=4),
        st.text(max_size=3).map(str.encode),
        st.sampled_from([b" ", b"", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\xed\xa0\x80"]),
    ),
    max_size=20,
)


@given(pieces, st.booleans(), st.sets(st.integers(0, 5)))
def test_pushes_and_flush_join_to_the_whole(
    table: list[bytes], strip: bool, skip: set[int]
) -> None:
    tokens = range(len(table))
    stream = Detokenizer(table.__getitem__, skip=skip, strip_space=strip)
    streamed = "".join([stream.push(token) for token in tokens]) + stream.flush()
    data = b"".join([table[token] for token in tokens if token not in skip])
    assert streamed == (data.removeprefix(b" ") if strip else data).decode(errors="replace")


@given(st.text(max_size=8))
def test_valid_text_in_single_bytes_never_shows_a_broken_character(text: str) -> None:
    data = text.encode("utf-8", "replace")
    stream = Detokenizer(lambda byte: bytes([byte]))
    shown = [stream.push(byte) for byte in data]
    assert "".join(shown) == data.decode()
    assert all(len(piece) <= 1 for piece in shown)
    assert stream.flush() == ""


def test_a_character_waits_for_its_last_byte() -> None:
    stream = Detokenizer(lambda byte: bytes([byte]))
    assert [stream.push(byte) for byte in "€".encode()] == ["", "", "€"]


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    stream = Detokenizer(lambda byte: bytes([byte]))
    assert stream.push(0xE2) + stream.push(0x82) == ""
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize(("strip", "text"), [(True, "a b"), (False, " a b")])
def test_only_the_first_space_is_stripped(strip: bool, text: str) -> None:
    table = [b"<s>", b" a", b" b"]
    stream = Detokenizer(table.__getitem__, skip={0}, strip_space=strip)
    assert "".join(map(stream.push, [0, 1, 2])) == text
