"""A packed sequence of strings is the sequence."""

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localrt.models.checkpoints import packed_strings
from localrt.models.checkpoints.packed_strings import PackedStrings

any_text = st.text(max_size=6)


@given(st.lists(any_text, max_size=12))
def test_holds_the_strings(strings: list[str]) -> None:
    packed = PackedStrings.of(strings)
    assert list(packed) == strings
    assert [packed[index] for index in range(len(packed))] == strings


def test_lone_surrogate() -> None:
    packed = PackedStrings.of(["\ud800", "a"])
    assert list(packed) == ["\ufffd" * 3, "a"]
    assert packed.encoded(0) == b"\xed\xa0\x80"


@given(st.lists(st.binary(max_size=5) | st.text(max_size=3).map(str.encode), max_size=12))
@example([b"\xe2", b"\x82\xac"])
@example([b"", b"\xff\xfe", b""])
def test_prefixed_strings(strings: list[bytes]) -> None:
    data = b"".join(struct.pack("<Q", len(text)) + text for text in strings)
    packed = PackedStrings.from_prefixed(np.frombuffer(data, np.uint8), len(strings))
    assert list(packed) == [text.decode(errors="replace") for text in strings]


@given(
    st.lists(st.text("\0\1a", max_size=9).map(str.encode) | st.just(b"a" * 300), max_size=40),
    st.integers(8, 400),
    st.integers(0, 3000),
)
def test_offsets_are_those_of_each_length(strings: list[bytes], window: int, cut: int) -> None:
    """Also of lengths and zeros that look like another, and of data that ends too soon."""
    data = b"".join(struct.pack("<Q", len(text)) + text for text in strings)[:cut]
    offsets, count = [0], len(strings)
    while len(offsets) <= count and offsets[-1] + 8 <= len(data):
        offsets.append(offsets[-1] + 8 + len(strings[len(offsets) - 1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_strings, "_WINDOW", window)
        found = packed_strings.prefixed_offsets(np.frombuffer(data, np.uint8), count)
    assert found.tolist() == offsets


def test_many_strings() -> None:
    strings = [str(number).encode() * (number % 3) for number in range(40_000)]
    data = b"".join(struct.pack("<Q", len(text)) + text for text in strings)
    packed = PackedStrings.from_prefixed(np.frombuffer(data, np.uint8), len(strings))
    assert list(packed) == [text.decode() for text in strings]


@pytest.mark.parametrize("index", [2, -1])
def test_index_outside(index: int) -> None:
    with pytest.raises(IndexError, match="of 2"):
        PackedStrings.of(["a", "b"])[index]
