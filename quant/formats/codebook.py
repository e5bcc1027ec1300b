"""ggml's types whose weights are entries of a codebook: IQ3, IQ2 and IQ1.

An entry is four or eight adjacent columns; a block of 256 has an index for each, signs of the
columns (IQ3, IQ2) or shifts of the entries (IQ1), and scales. This module splits blocks into fields
of integers and joins them again. ``convert.py`` turns fields into values, ``tiled.py`` into tiles.
The entries come from the ``gguf`` package.

Tiles of codebook types: the spans of ``tiled.py`` with their indices, signs and scales.

A span is a block, 256 columns of 16 rows. Its head:

    d       16 halves
    scales  iq3_s: a word per row with the block's eight nibbles; iq2_xs and iq2_s: two words
            per row with its sixteen; iq1_m: pairs of scales, eight six-bit values, stored like
            IQ4_XS's

Its eight steps:

    index   a vector per four entries: byte (row, j) is the low byte of index j
    signs   not iq1: eight 64-bit masks: bit 4 * row + i of mask v is set where column 4v + i is
            negative. Where signs are seven to eight columns, the last column's follows from the
            others, and bits 4 * row + 3 of the odd masks 2j + 1 have bit j of the row's scale
            (iq3_xxs, iq2_xxs) or bit 8 of its index j (iq2_xs)
    high    masks of the other bits of indices, lowest first: bit 4 * row + j of index j, or of the
            second mask's index 4 + j
    rest    iq1_s: bits 4 * row to 4 * row + 3 of a mask have the row's scale and, on top, its sign;
            iq1_m: bit 4 * row + j of a mask is the sign of entry j
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.six_bits import eight_in_words, eight_of_words

# Integers of several widths; numpy's stubs lose the type in shifts.
Numbers = npt.NDArray[Any]
_BITS = np.arange(8, dtype=np.uint8)
_SEVENS = np.array([0, 7, 14, 21], np.uint32)
_THREES = np.array([0, 3, 6, 9], np.uint16)
# Seven signs, and an eighth that makes the number of negative ones even.
_EVEN = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)


@dataclass(frozen=True, slots=True)
class Codebook:
    """How a type uses its codebook.

    ``width`` columns per entry, ``index_bits`` per index, ``groups`` scales per block. A value is
    ``unit * (2 * scale + 1) * d`` times an integer from ``-zero`` to ``zero``: an entry's with its
    sign, or if ``shifted``, eight times an entry's, plus or minus 1.
    """

    grid: str
    width: int
    index_bits: int
    groups: int
    unit: float
    zero: int
    shifted: bool = False

    @property
    def entries(self) -> npt.NDArray[np.uint8]:
        """(2 ** index_bits, width): integers; plus 1 if ``shifted``."""
        return _entries(self.grid, self.shifted)

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        """The codes that kernels take: values plus ``zero``, minus 1 if ``shifted``."""
        return self.entries * np.uint8(8) if self.shifted else self.entries + np.uint8(self.zero)


CODEBOOKS = MappingProxyType(
    {
        "iq3_xxs": Codebook("IQ3_XXS", 4, 8, 8, 0.25, 62),
        "iq3_s": Codebook("IQ3_S", 4, 9, 8, 1.0, 15),
        "iq2_xxs": Codebook("IQ2_XXS", 8, 8, 8, 0.125, 43),
        "iq2_xs": Codebook("IQ2_XS", 8, 9, 16, 0.125, 43),
        "iq2_s": Codebook("IQ2_S", 8, 10, 16, 0.125, 43),
        "iq1_s": Codebook("IQ1_S", 8, 11, 8, 0.125, 9, shifted=True),
        "iq1_m": Codebook("IQ1_S", 8, 11, 16, 0.125, 9, shifted=True),
    }
)
"""Codebooks by format name."""


@cache
def _entries(grid: str, shifted: bool) -> npt.NDArray[np.uint8]:
    from gguf import quants  # takes 0.1 s, so only for files with such types

    type_ = getattr(quants, grid)
    type_.init_grid()
    entries = (type_.grid[0, 0] + (1 if shifted else 0)).astype(np.uint8)
    entries.flags.writeable = False
    frozen: npt.NDArray[np.uint8] = entries
    return frozen


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of n blocks.

    ``d`` (n,) float16 as ``uint16``; ``index`` (n, 256 / width); ``scale`` (n, groups); ``signs``
    (n, 256) is 1 where a column is negative; for ``shifted`` codebooks, (n, 32) is 1 where an entry
    is shifted by -1/8 instead of 1/8.
    """

    d: npt.NDArray[np.uint16]
    index: npt.NDArray[np.uint16]
    scale: npt.NDArray[np.uint8]
    signs: npt.NDArray[np.uint8]


def split_fields(name: str, blocks: Numbers) -> Fields:
    """Blocks (n, block_bytes) as fields."""
    count = len(blocks)
    if name == "iq1_m":
        words = _words(blocks, 48, 56, "<u2")
        tops = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
        d: Numbers = np.bitwise_or.reduce(tops, axis=1)
        scale = (words[:, :, None] >> _THREES & 7).reshape(count, 16)
        high = _nibbles(blocks[:, 32:48])
        return _fields(d, _wide(blocks[:, :32], high & 7), scale, high >> 3)
    d = _words(blocks, 0, 2, "<u2")[:, 0]
    if name == "iq1_s":
        words = _words(blocks, 34, 50, "<u2")
        high = (words[:, :, None] >> _THREES & 7).reshape(count, 32)
        signs = np.repeat(words >> 15, 4, axis=1)
        return _fields(d, _wide(blocks[:, 2:34], high), words >> 12 & 7, signs)
    if name == "iq2_s":
        high = (blocks[:, 66:74, None] >> _BITS[::2] & 3).reshape(count, 32)
        index = _wide(blocks[:, 2:34], high)
        return _fields(d, index, _nibbles(blocks[:, 74:82]), _ones(blocks[:, 34:66]))
    if name == "iq3_s":
        index = _wide(blocks[:, 2:66], _ones(blocks[:, 66:74]))
        return _fields(d, index, _nibbles(blocks[:, 106:110]), _ones(blocks[:, 74:106]))
    if name == "iq2_xs":
        words = _words(blocks, 2, 66, "<u2")
        signs = _ones(_EVEN[words >> 9])
        return _fields(d, words & 511, _nibbles(blocks[:, 66:74]), signs)
    if name == "iq2_xxs":
        pairs = _words(blocks, 2, 66, "<u4").reshape(count, 8, 2)
        index, words = np.ascontiguousarray(pairs[..., 0]).view(np.uint8), pairs[..., 1]
    else:
        assert name == "iq3_xxs", name
        index, words = blocks[:, 2:66], _words(blocks, 66, 98, "<u4")
    sevens = (words[:, :, None] >> _SEVENS & 127).reshape(count, 32)
    return _fields(d, index, words >> 28, _ones(_EVEN[sevens]))


def join_fields(name: str, fields: Fields) -> npt.NDArray[np.uint8]:
    """The inverse of ``split_fields``."""
    index, scale, signs = fields.index, fields.scale, fields.signs
    count = len(index)
    d, low = fields.d[:, None].view(np.uint8), index.astype(np.uint8)
    high = (index >> 8).astype(np.uint8)
    if name == "iq1_m":
        words = np.bitwise_or.reduce(scale.astype(np.uint16).reshape(count, 4, 4) << _THREES, 2)
        words |= (fields.d[:, None] >> np.array([0, 4, 8, 12], np.uint16)) << 12
        parts = [low, _from_nibbles(high | signs << 3), words.view(np.uint8)]
    elif name == "iq1_s":
        words = np.bitwise_or.reduce((index >> 8).reshape(count, 8, 4) << _THREES, 2)
        words |= scale.astype(np.uint16) << 12 | signs[:, ::4].astype(np.uint16) << 15
        parts = [d, low, words.view(np.uint8)]
    elif name == "iq2_s":
        twos = np.bitwise_or.reduce(high.reshape(count, 8, 4) << _BITS[::2], axis=2)
        parts = [d, low, _from_ones(signs), twos, _from_nibbles(scale)]
    elif name == "iq3_s":
        parts = [d, low, _from_ones(high), _from_ones(signs), _from_nibbles(scale)]
    elif name == "iq2_xs":
        sevens = (_from_ones(signs) & 127).astype(np.uint16)
        parts = [d, (index | sevens << 9).view(np.uint8), _from_nibbles(scale)]
    else:
        sevens = (_from_ones(signs) & 127).astype(np.uint32).reshape(count, 8, 4) << _SEVENS
        words = np.bitwise_or.reduce(sevens, axis=2) | scale.astype(np.uint32) << 28
        if name == "iq2_xxs":
            pairs = np.stack([low.view("<u4"), words], axis=2).reshape(count, 16)
            parts = [d, pairs.view(np.uint8)]
        else:
            parts = [d, low, words.view(np.uint8)]
    return np.concatenate(parts, axis=1)


def _fields(d: Numbers, index: Numbers, scale: Numbers, signs: Numbers) -> Fields:
    return Fields(
        np.ascontiguousarray(d),
        np.ascontiguousarray(index, np.uint16),
        np.ascontiguousarray(scale, np.uint8),
        np.ascontiguousarray(signs, np.uint8),
    )


def _words(blocks: Numbers, start: int, stop: int, kind: str) -> Numbers:
    return np.ascontiguousarray(blocks[:, start:stop]).view(kind)


def _wide(low: Numbers, high: Numbers) -> Numbers:
    return low.astype(np.uint16) | high.astype(np.uint16) << 8


def _nibbles(packed: Numbers) -> Numbers:
    """(n, m) bytes to (n, 2m) nibbles, the low one of a byte first."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def _from_nibbles(numbers: Numbers) -> Numbers:
    packed: Numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    return packed


def _ones(packed: Numbers) -> Numbers:
    """(n, m) bytes to their bits (n, 8m)."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def _from_ones(bits: Numbers) -> Numbers:
    return np.packbits(bits, axis=1, bitorder="little")


_ROWS, _STEPS = 16, 8
_SPARE = ("iq3_xxs", "iq2_xxs", "iq2_xs")  # signs of seven bits
_WORDS = {"iq3_s": 64, "iq2_xs": 128, "iq2_s": 128, "iq1_m": 96}  # bytes of a head's scales


def spans_of_blocks(name: str, blocks: Numbers) -> Numbers:
    """Spans (n, bytes) from blocks (n, 16 rows, block_bytes)."""
    fields = split_fields(name, blocks.reshape(-1, blocks.shape[-1]))
    d = fields.d.view(np.uint8).reshape(len(blocks), -1)
    return np.concatenate([d, *_scale_words(name, fields), _steps(name, fields)], axis=1)


def blocks_of_spans(name: str, spans: Numbers) -> Numbers:
    """The inverse."""
    d = np.ascontiguousarray(spans[:, :32]).view(np.uint16).reshape(-1)
    words = spans[:, 32 : 32 + _WORDS.get(name, 0)]
    fields = _tile_fields(name, spans[:, 32 + words.shape[1] :], d, _scales_of_words(name, words))
    blocks: Numbers = join_fields(name, fields).reshape(len(spans), _ROWS, -1)
    return blocks


def _scale_words(name: str, fields: Fields) -> list[Numbers]:
    """The head's scales, (n, bytes) each."""
    if name not in _WORDS:
        return []
    scale = fields.scale.reshape(-1, _ROWS, fields.scale.shape[1])
    if name == "iq1_m":
        return [eight_in_words(scale[..., ::2] | scale[..., 1::2] << 3)]
    nibbles = (scale[..., ::2] | scale[..., 1::2] << 4).reshape(len(scale), _ROWS, -1, 4)
    return [nibbles.swapaxes(1, 2).reshape(len(scale), -1)]


def _scales_of_words(name: str, words: Numbers) -> Numbers | None:
    """The inverse: (16 n, groups); None where scales are in the steps."""
    if name not in _WORDS:
        return None
    if name == "iq1_m":
        pairs = eight_of_words(words)
        scale = np.stack([pairs & 7, pairs >> 3], axis=-1)
    else:
        bytes_ = words.reshape(len(words), -1, _ROWS, 4).swapaxes(1, 2)
        scale = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1)
    return scale.reshape(len(words) * _ROWS, -1)


def _steps(name: str, fields: Fields) -> Numbers:
    """The steps of spans, (n, bytes), from the fields of 16 n blocks; a span's are consecutive."""
    book = CODEBOOKS[name]
    index = _by_step(fields.index, 4)  # (n, steps, vectors, 16, 4)
    low = index.astype(np.uint8)
    masks: list[Numbers] = []  # (n, steps, masks, 16, 4)
    if not book.shifted:
        signs = _by_step(fields.signs, 4)
        if name in _SPARE:
            bits = _bits(_scales(fields.scale), 4) if name != "iq2_xs" else index[:, :, 0] >> 8 & 1
            signs[:, :, 1::2, :, 3] = bits.swapaxes(2, 3)
        masks.append(signs)
    if name != "iq2_xs":
        masks += [index >> bit & 1 for bit in range(8, book.index_bits)]
    if name == "iq1_m":
        masks.append(_by_step(fields.signs, 4))
    elif name == "iq1_s":
        signs = _by_step(fields.signs, 4)[:, :, 0, :, 0]
        masks.append(_bits(_scales(fields.scale) | signs << 3, 4)[:, :, None])
    bits = np.concatenate([mask.astype(np.uint8) for mask in masks], axis=2)
    packed = np.packbits(bits.reshape(*bits.shape[:3], 64), axis=3, bitorder="little")
    count = len(low)
    steps = [low.reshape(count, _STEPS, -1), packed.reshape(count, _STEPS, -1)]
    return np.concatenate(steps, axis=2).reshape(count, -1)


def _tile_fields(name: str, steps: Numbers, d: Numbers, scale: Numbers | None) -> Fields:
    """The inverse; ``d`` and the head's scales are (16 n, ...), as in ``Fields``."""
    book = CODEBOOKS[name]
    vectors, width = 32 // book.width // 4, 32 // book.width // 4 * 64
    by_step = steps.reshape(len(steps), _STEPS, -1)
    low = by_step[..., :width].reshape(len(steps), _STEPS, vectors, _ROWS, 4)
    bits = np.unpackbits(np.ascontiguousarray(by_step[..., width:]), axis=2, bitorder="little")
    masks = bits.reshape(len(steps), _STEPS, -1, _ROWS, 4)
    index, at = low.astype(np.uint16), 0
    if not book.shifted:
        at = 8
        signs = masks[:, :, :8].copy()
        if name in _SPARE:
            spare = masks[:, :, 1:8:2, :, 3].swapaxes(2, 3)  # (n, steps, 16, 4)
            even, odd = signs[:, :, ::2], signs[:, :, 1::2, :, :3]
            signs[:, :, 1::2, :, 3] = (even.sum(axis=4) + odd.sum(axis=4)) & 1
            if name == "iq2_xs":
                index |= spare[:, :, None].astype(np.uint16) << 8
            else:
                scale = _by_row(_number(spare)[:, :, None, :, None])
    if name != "iq2_xs":
        for bit in range(8, book.index_bits):
            index |= masks[:, :, at : at + vectors].astype(np.uint16) << bit
            at += vectors
    if name == "iq1_m":
        signs = masks[:, :, at:]
    elif name == "iq1_s":
        both = _number(masks[:, :, at])  # (n, steps, 16)
        scale = _by_row((both & 7)[:, :, None, :, None])
        signs = np.repeat((both >> 3)[:, :, None, :, None], 4, axis=4)
    assert scale is not None
    return Fields(d, _by_row(index), scale, _by_row(signs))


def _by_step(field: Numbers, width: int) -> Numbers:
    """(16 n, 8 m width) to (n, 8 steps, m, 16 rows, width)."""
    rows = field.reshape(-1, _ROWS, _STEPS, field.shape[1] // _STEPS // width, width)
    return np.ascontiguousarray(rows.transpose(0, 2, 3, 1, 4))


def _by_row(field: Numbers) -> Numbers:
    """The inverse."""
    rows = np.ascontiguousarray(field.transpose(0, 3, 1, 2, 4))
    return rows.reshape(len(field) * _ROWS, -1)


def _scales(scale: Numbers) -> Numbers:
    """(16 n, 8) to (n, 8 steps, 16)."""
    return _by_step(scale, 1)[:, :, 0, :, 0]


def _bits(numbers: Numbers, count: int) -> Numbers:
    each: Numbers = numbers[..., None] >> np.arange(count, dtype=np.uint8) & 1
    return each


def _number(bits: Numbers) -> Numbers:
    """Four bits to a nibble, lowest first."""
    weights = np.array([1, 2, 4, 8], np.uint8)
    number: Numbers = (bits * weights).sum(axis=-1, dtype=np.uint8)
    return number
