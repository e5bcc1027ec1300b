"""A packed sequence of strings is the sequence."""

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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


def test_many_strings() -> None:
    strings = [str(number).encode() * (number % 3) for number in range(40_000)]
    data = b"".join(struct.pack("<Q", len(text)) + text for text in strings)
    packed = PackedStrings.from_prefixed(np.frombuffer(data, np.uint8), len(strings))
    assert list(packed) == [text.decode() for text in strings]


@pytest.mark.parametrize("index", [2, -1])
def test_index_outside(index: int) -> None:
    with pytest.raises(IndexError, match="of 2"):
        PackedStrings.of(["a", "b"])[index]
