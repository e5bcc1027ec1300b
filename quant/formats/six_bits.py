"""Six-bit scales and minima of K-quants, in blocks and in tiles.

In a block their bits are scattered. In a tile, each row's values are packed in words, lowest first:
a lane extracts one with a shift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

# Always uint8; numpy's stubs lose the type in shifts.
Codes = npt.NDArray[Any]

_ROWS = 16
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def six_bit_scales(name: str, packed: Codes) -> Codes:
    """The six-bit values of a block's bytes: (..., 12) to (..., 16); for iq4_xs, (..., 6) to (...,
    8).

    Q3_K has scales: low nibbles in eight bytes, high bit pairs in four. Q4_K and Q5_K have eight
    scales, then eight minima: those of groups 0-3 are bytes 0-3 and 4-7; those of groups 4-7 have
    low nibbles in bytes 8-11 and high bits in the top bits of bytes 0-7. IQ4_XS has scales: high
    bit pairs in two bytes, low nibbles in four, two consecutive ones per byte.
    """
    if name == "q3_k":
        low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
        high = np.concatenate([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
        three: Codes = low | high << 4
        return three
    if name == "iq4_xs":
        nibbles = np.stack([packed[..., 2:] & 15, packed[..., 2:] >> 4], axis=-1)
        high = np.concatenate([packed[..., at, None] >> _SHIFTS & 3 for at in (0, 1)], axis=-1)
        eight: Codes = nibbles.reshape(high.shape) | high << 4
        return eight
    assert name in ("q4_k", "q5_k"), name
    first, second, third = (packed[..., i : i + 4] for i in (0, 4, 8))
    scales = [first & 63, (third & 15) | (first >> 6) << 4]
    minima = [second & 63, (third >> 4) | (second >> 6) << 4]
    return np.concatenate([*scales, *minima], axis=-1)


def _words(name: str, packed: Codes) -> Codes:
    """Twelve bytes of sixteen six-bit values, as words (see ``_in_words``)."""
    return _in_words(six_bit_scales(name, packed))


def _k_bytes(words: Codes) -> Codes:
    """The inverse for Q4_K and Q5_K."""
    numbers = _of_words(words)
    low, last = numbers[..., :4], numbers[..., 4:8]
    low_minima, last_minima = numbers[..., 8:12], numbers[..., 12:]
    first = low | (last >> 4) << 6
    second = low_minima | (last_minima >> 4) << 6
    return np.concatenate([first, second, (last & 15) | (last_minima & 15) << 4], axis=-1)


def _q3_k_bytes(words: Codes) -> Codes:
    """The inverse for Q3_K."""
    return join_six_bits(_of_words(words))


def join_six_bits(numbers: Codes) -> Codes:
    """The inverse of ``six_bit_scales`` for Q3_K: (..., 16) to (..., 12)."""
    low, high = numbers & 15, (numbers >> 4).reshape(*numbers.shape[:-1], 4, 4) << _SHIFTS[:, None]
    return np.concatenate(
        [low[..., :8] | low[..., 8:] << 4, np.bitwise_or.reduce(high, axis=-2)], axis=-1
    )


def _in_words(six: Codes) -> Codes:
    """Sixteen six-bit values (..., 16 rows, 16) as three words per row.

    Word w has values 5w to 5w + 4, lowest first; its top two bits are bits 2w and 2w + 1 of the
    last value. The 16 rows' words w are consecutive.
    """
    six = six.astype(np.uint32)
    shifts = np.arange(5, dtype=np.uint32) * 6
    words = [
        np.bitwise_or.reduce(six[..., 5 * w : 5 * w + 5] << shifts, axis=-1)
        | (six[..., 15] >> 2 * w & 3) << 30
        for w in range(3)
    ]
    return np.ascontiguousarray(np.stack(words, axis=-2), "<u4").view(np.uint8)


def _of_words(words: Codes) -> Codes:
    """The inverse."""
    flat = np.ascontiguousarray(words).reshape(*words.shape[:2], 3, _ROWS, 4)
    values = flat.view("<u4")[..., 0]  # (..., 3, 16)
    six = [values[..., i // 5, :] >> 6 * (i % 5) & 63 for i in range(15)]
    six.append(np.bitwise_or.reduce([values[..., w, :] >> 30 << 2 * w for w in range(3)]))
    return np.stack(six, axis=-1).astype(np.uint8)  # (..., 16, 16)


def eight_in_words(six: Codes) -> Codes:
    """Eight six-bit values (..., 16 rows, 8) as a word and two bytes per row: (..., 96).

    The word has the first five, lowest first; the bytes have the next two. The top two bits of all
    three form the last value. The 16 rows' words are consecutive, and so are their bytes.
    """
    words = np.bitwise_or.reduce(
        six[..., :5].astype(np.uint32) << np.arange(5, dtype=np.uint32) * 6, axis=-1
    )
    words |= (six[..., 7].astype(np.uint32) & 3) << 30
    last = [six[..., 5] | (six[..., 7] >> 2 & 3) << 6, six[..., 6] | six[..., 7] >> 4 << 6]
    return np.concatenate([np.ascontiguousarray(words, "<u4").view(np.uint8), *last], axis=-1)


def eight_of_words(field: Codes) -> Codes:
    """The inverse."""
    words = np.ascontiguousarray(field[..., :64]).view("<u4")
    first, second = field[..., 64:80], field[..., 80:]
    six = [(words >> 6 * i & 63).astype(np.uint8) for i in range(5)]
    last = (words >> 30).astype(np.uint8) | first >> 6 << 2 | second >> 6 << 4
    return np.stack([*six, first & 63, second & 63, last], axis=-1)


def _iq4_words(packed: Codes) -> Codes:
    """IQ4_XS's six bytes of eight scales, as words (see ``eight_in_words``)."""
    return eight_in_words(six_bit_scales("iq4_xs", packed))


def _iq4_bytes(words: Codes) -> Codes:
    """The inverse."""
    numbers = eight_of_words(words)
    low, high = numbers & 15, (numbers >> 4).reshape(*numbers.shape[:-1], 2, 4) << _SHIFTS
    return np.concatenate(
        [np.bitwise_or.reduce(high, axis=-1), low[..., ::2] | low[..., 1::2] << 4], axis=-1
    )


Regroup = Callable[[Codes], Codes]
SIX_BIT_FIELDS: Mapping[str, Mapping[int, tuple[Regroup, Regroup]]] = MappingProxyType(
    {
        "q3_k": {1: (partial(_words, "q3_k"), _q3_k_bytes)},
        "q4_k": {2: (partial(_words, "q4_k"), _k_bytes)},
        "q5_k": {2: (partial(_words, "q5_k"), _k_bytes)},
        "iq4_xs": {1: (_iq4_words, _iq4_bytes)},
    }
)
"""For head fields with six-bit values: functions that regroup them for a tile, and back."""
