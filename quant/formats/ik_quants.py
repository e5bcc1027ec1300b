"""Types of ik_llama.cpp in GGUF files, converted exactly to formats that localrt computes in.

A value is d * scale * level. d is a half of a block of 256 columns, or in front of a row a half or
a float32. Groups of 16 or 32 columns have a small integer scale, and a bit that adds a few units to
all their levels, which are integers from a table. Products have ik_llama.cpp's bits: it multiplies
in this order. In ``_R4`` types four rows are interleaved; their bits are put back first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType

import numpy as np

from localrt.quant.formats.catalog import write_codes
from localrt.quant.formats.codebook import Numbers
from localrt.quant.formats.ggml import INT8_G16K, Q6_K
from localrt.quant.formats.packed import Bytes, Format, split_nibbles
from localrt.quant.formats.published import ZeroPointCodec

Fields = Callable[[Bytes], tuple[Numbers, Numbers, Numbers]]
"""Of blocks (n, k): scales and added bits (n, groups), and codes (n, 256)."""
_FLOAT_SCALES = ZeroPointCodec(8, 32)
_PAIRS, _EIGHT = np.array([0, 2, 4, 6], np.uint8), np.arange(8, dtype=np.uint8)


def _levels(added: int, text: str) -> Numbers:
    """A table of levels, and the same with ``added``: (2, levels)."""
    levels = np.array(text.split(), np.int16)
    return np.stack([levels, levels + added])


_TWO, _THREE = _levels(5, "-31 -13 1 17"), _levels(4, "-63 -40 -23 -10 1 13 28 47")
_FOUR = _levels(4, "-127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113")
_FIVE = _levels(
    2,
    "-126 -114 -103 -92 -83 -74 -65 -57 -50 -43 -36 -30 -24 -18 -12 -6 -1 5 11 17 23 29 36 43 51 "
    "59 68 77 87 97 109 121",
)
_SIX = _levels(
    1,
    "-127 -121 -115 -109 -104 -98 -93 -88 -84 -79 -74 -70 -66 -62 -58 -54 -51 -47 -44 -40 -37 -34 "
    "-31 -28 -25 -22 -19 -16 -13 -11 -8 -5 -2 0 3 6 9 12 14 17 20 23 27 30 33 36 40 44 47 51 55 59 "
    "63 68 72 77 82 87 92 98 103 109 115 121",
)


def _bits(field: Bytes) -> Numbers:
    return np.unpackbits(field, axis=1, bitorder="little")


def _nibbles(field: Bytes) -> Numbers:
    return np.stack([field & 15, field >> 4], axis=-1).reshape(len(field), -1)


def _low(field: Bytes, run: int) -> Numbers:
    """Low nibbles of ``run`` bytes, then their high ones: (n, 128) to (n, 256)."""
    return split_nibbles(field.reshape(len(field), -1, run)).reshape(len(field), -1)


def _runs(field: Bytes) -> Numbers:
    """Pairs of bits, which four runs of 32 columns share: (n, 64) to (n, 256)."""
    return (field.reshape(-1, 2, 1, 32) >> _PAIRS[:, None] & 3).reshape(len(field), -1)


def _planes(field: Bytes) -> Numbers:
    """Bits, which eight runs of 32 columns share: (n, 32) to (n, 256)."""
    return (field[:, None] >> _EIGHT[:, None] & 1).reshape(len(field), -1)


def _iq3_k(b: Bytes) -> tuple[Numbers, Numbers, Numbers]:
    scales = (2 * _nibbles(b[:, 6:14]) + 1) * (1 - 2 * _bits(b[:, 4:6]).astype(np.int16))
    return scales, _bits(b[:, 2:4]), _runs(b[:, 14:78]) | _planes(b[:, 78:]) << 2


def _six_bits(b: Bytes) -> tuple[Numbers, Numbers]:
    high = (b[:, 4:8, None] >> _PAIRS & 3).reshape(len(b), -1)
    return (_nibbles(b[:, 8:16]) | high << 4) - np.int16(32), _bits(b[:, 2:4])


def _odd(scales: Bytes) -> tuple[Numbers, Numbers]:
    return (scales & 254) - np.int16(127), scales & 1


def _iq4_kss(b: Bytes) -> tuple[Numbers, Numbers, Numbers]:
    """The lowest bits of eight words are a scale; the other bits are differences."""
    words = np.ascontiguousarray(b[:, 4:]).view("<u2")
    scales = np.packbits((words & 1).astype(np.uint8), axis=1, bitorder="little")
    even = words & 0xFFFE
    return *_odd(scales), _low((even ^ even >> 1).astype("<u2").view(np.uint8), 16)


_TYPES: tuple[tuple[int, Format, Format, Numbers, Fields], ...] = (
    (137, Format("iq2_k", 256, 76), Q6_K, _TWO,
     lambda b: (_nibbles(b[:, 4:12]) - np.int16(8), _bits(b[:, 2:4]), _runs(b[:, 12:]))),
    (138, Format("iq3_k", 256, 110), INT8_G16K, _THREE, _iq3_k),
    (139, Format("iq4_k", 256, 144), INT8_G16K, _FOUR,
     lambda b: (*_six_bits(b), _low(b[:, 16:], 16))),
    (140, Format("iq5_k", 256, 176), INT8_G16K, _FIVE,
     lambda b: (*_six_bits(b), _low(b[:, 16:144], 32) | _planes(b[:, 144:]) << 4)),
    (141, Format("iq6_k", 256, 212), INT8_G16K, _SIX,
     lambda b: (b[:, 4:20].view(np.int8), _bits(b[:, 2:4]),
                _low(b[:, 20:148], 32) | _runs(b[:, 148:]) << 4)),
    (144, Format("iq4_ks", 256, 136, row_head=4), _FLOAT_SCALES.format, _FOUR,
     lambda b: (*_odd(b[:, 4:12]), _low(b[:, 12:], 16))),
    (145, Format("iq2_ks", 256, 70, row_head=2), Q6_K, _TWO,
     lambda b: ((_nibbles(b[:, 4:8]) | _bits(b[:, 3:4]) << 4) - np.int16(16),
                _bits(b[:, 2:3]), _runs(b[:, 8:]))),
    (146, Format("iq4_kss", 256, 128, row_head=4), _FLOAT_SCALES.format, _FOUR, _iq4_kss),
    (152, Format("iq5_ks", 256, 168, row_head=4), _FLOAT_SCALES.format, _FIVE,
     lambda b: (*_odd(b[:, 4:12]), _low(b[:, 12:140], 32) | _planes(b[:, 140:]) << 4)),
    (156, Format("iq3_ks", 256, 102, row_head=2), INT8_G16K, _THREE,
     lambda b: ((split_nibbles(b[:, 4:8]) | _bits(b[:, 2:3]) << 4) - np.int16(16),
                _bits(b[:, 3:4]), _runs(b[:, 8:72]) | _planes(b[:, 72:]) << 2)),
)  # fmt: skip


def _converted(fields: Fields, table: Numbers, target: Format, blocks: Bytes) -> Bytes:
    """Blocks (n, k), each after its row's head, in ``target``."""
    scales, added, codes = fields(blocks)
    groups = scales.shape[1]
    levels = table[added[:, :, None], codes.reshape(-1, groups, 256 // groups)]
    if target == _FLOAT_SCALES.format:
        factors = np.ascontiguousarray(blocks[:, :4]).view("<f4") * scales.astype(np.float32)
        pairs = np.stack([factors.reshape(-1), np.full(factors.size, 128, np.float32)], axis=1)
        return _FLOAT_SCALES.join((levels + 128).astype(np.uint8).reshape(-1, 32), pairs)
    first, d = (192, 208) if target == Q6_K else (2, 0)
    found = np.empty((len(blocks), target.block_bytes), np.uint8)
    found[:, d : d + 2] = blocks[:, :2]
    found[:, first : first + 16].view(np.int8)[:] = np.repeat(scales, 16 // groups, axis=1)
    write_codes(target.name, (levels.reshape(-1, 256) + target.zero).astype(np.uint8), found)
    return found


IK_FORMATS: Mapping[int, Format] = MappingProxyType({number: own for number, own, *_ in _TYPES})
"""ik_llama.cpp's types, by their number in GGUF files."""
IK_CONVERSIONS: Mapping[Format, tuple[Format, Callable[[Bytes], Bytes]]] = MappingProxyType(
    {own: (to, partial(_converted, fields, table, to)) for _, own, to, table, fields in _TYPES}
)
"""The format that holds a type's values exactly, and the function that converts blocks to it."""

# Axes of bits of each field of four rows (k), interleaved and plain.
_SIZES = {"x": 16, "z": 8, "g": 8, **dict.fromkeys("bcfikqPR", 4), **dict.fromkeys("aehnopryH", 2)}
_D_ADDED, _SCALES, _HIGH = "kx->kx hkg->kgh", "chkab->kachb", "ehkfy->kfehy"
_TWO_BITS, _FOUR_BITS = "HRokiPy->kHoPiRy", "gpokinb->kgnpiob"
_FIVE_BITS = "qrpokinb->kqonpirb gkipon->konpig"
_FIELDS_OF_FOUR = {
    "iq2_k": f"{_D_ADDED} {_SCALES} {_TWO_BITS}",
    "iq3_k": f"{_D_ADDED} hkg->kgh {_SCALES} {_TWO_BITS} gkioP->koPig",
    "iq4_k": f"{_D_ADDED} {_HIGH} {_SCALES} {_FOUR_BITS}",
    "iq5_k": f"{_D_ADDED} {_HIGH} {_SCALES} {_FIVE_BITS}",
    "iq4_ks": f"gkz->kgz {_FOUR_BITS}",
    "iq5_ks": f"gkz->kgz {_FIVE_BITS}",
}
IK_FOUR_ROWS: Mapping[int, Format] = MappingProxyType(
    {number + 200: own for number, own in IK_FORMATS.items() if own.name in _FIELDS_OF_FOUR}
)
"""The types of the plain rows of ``_R4`` types."""


@cache
def _places(name: str) -> Numbers:
    """Where each bit of four plain rows' blocks is among the interleaved ones."""
    first, fields = 0, []
    for source, target in (field.split("->") for field in _FIELDS_OF_FOUR[name].split()):
        sizes = [_SIZES[axis] for axis in source]
        places = first + np.arange(np.prod(sizes)).reshape(sizes)
        fields.append(places.transpose([source.index(axis) for axis in target]).reshape(4, -1))
        first += places.size
    return np.concatenate(fields, axis=1).reshape(-1)


def plain_rows(format_: Format, rows: Bytes) -> Bytes:
    """Interleaved rows (4 n, row bytes) as rows of ``format_``."""
    heads, blocks = np.split(rows.reshape(len(rows) // 4, -1), [4 * format_.row_head], axis=1)
    bits = _bits(blocks.reshape(-1, 4 * format_.block_bytes))[:, _places(format_.name)]
    plain = np.packbits(bits, axis=1, bitorder="little")
    ordered = plain.reshape(len(blocks), -1, 4, format_.block_bytes).swapaxes(1, 2)
    return np.concatenate([part.reshape(len(rows), -1) for part in (heads, ordered)], axis=1)
