"""The tiles of codebook types: what a span of ``tiled.py`` holds of entries, signs and scales.

A span is a block, 256 columns of 16 rows. Its head:

    d       16 halves
    scales  iq3_s: a word a row, of the block's eight nibbles; iq2_xs and iq2_s: two words a row, of
            its sixteen; iq1_m: its scales in pairs, eight numbers of six bits, as IQ4_XS has them

Its eight steps:

    index   a vector for every four entries: byte (row, j) is the low byte of index j
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

from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.codebook import CODEBOOKS, Fields, join_fields, split_fields
from localrt.quant.formats.six_bits import eight_in_words, eight_of_words

__all__ = ["blocks_of_spans", "spans_of_blocks"]

_ROWS, _STEPS = 16, 8
_SPARE = ("iq3_xxs", "iq2_xxs", "iq2_xs")  # signs of seven bits
_WORDS = {"iq3_s": 64, "iq2_xs": 128, "iq2_s": 128, "iq1_m": 96}  # bytes of a head's scales

Numbers = npt.NDArray[Any]


def spans_of_blocks(name: str, blocks: Numbers) -> Numbers:
    """The spans (n, bytes) of blocks (n, 16 rows, block_bytes)."""
    fields = split_fields(name, blocks.reshape(-1, blocks.shape[-1]))
    d = fields.d.view(np.uint8).reshape(len(blocks), -1)
    return np.concatenate([d, *_scale_words(name, fields), _steps(name, fields)], axis=1)


def blocks_of_spans(name: str, spans: Numbers) -> Numbers:
    """The inverse."""
    d = np.ascontiguousarray(spans[:, :32]).view(np.uint16).reshape(-1)
    words = spans[:, 32 : 32 + _WORDS.get(name, 0)]
    fields = _fields(name, spans[:, 32 + words.shape[1] :], d, _scales_of_words(name, words))
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
    """The steps of spans, (n, bytes): fields are those of 16 n blocks, a span's together."""
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


def _fields(name: str, steps: Numbers, d: Numbers, scale: Numbers | None) -> Fields:
    """The inverse; ``d`` and the head's scales are (16 n, ...), as fields have them."""
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
    """Four bits each, lowest first."""
    weights = np.array([1, 2, 4, 8], np.uint8)
    number: Numbers = (bits * weights).sum(axis=-1, dtype=np.uint8)
    return number
