"""The C++ type of each packed format (``quant/cuda/src/formats.cuh``): codes, scales, steps per
span.

This module imports nothing heavy, so that any module can ask whether a format has a kernel.
Codebooks are read when a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import numpy as np

from localrt.quant.formats.affine import AFFINE, AffineCodec
from localrt.quant.formats.catalog import FORMATS
from localrt.quant.formats.codebook import CODEBOOKS
from localrt.quant.formats.packed import Format, GroupCodec
from localrt.quant.formats.published import PUBLISHED, BrainCodec, LevelFloatCodec, ZeroPointCodec
from localrt.quant.formats.tiled import tile_span


def _affine(codec: AffineCodec) -> str:
    if codec.minimum:
        return f"Packed<Whole<{codec.bits}, 0>, HalfScaleAndMinimum, {codec.group // 32}>"
    return f"Packed<Whole<{codec.bits}, {codec.zero}>, HalfScale, {codec.group // 32}>"


def _published(codec: GroupCodec) -> str | None:
    """None if there is no kernel: integer products cannot take E4M3 codes."""
    steps = codec.format.block // 32
    if isinstance(codec, BrainCodec):
        return f"Packed<Whole<{codec.bits}, 0>, BrainScaleAndMinimum, {steps}>"
    if isinstance(codec, ZeroPointCodec):
        return f"Packed<Whole<{codec.bits}, 0>, FloatScaleAndZero, {steps}>"
    if isinstance(codec, LevelFloatCodec):
        return f"Packed<{codec.kind.capitalize()}, FloatScale, {steps}>"
    return None


TYPES = MappingProxyType(
    {
        "q4_0": "Packed<Whole<4, 8>, HalfScale, 1>",
        "q4_1": "Packed<Whole<4, 0>, HalfScaleAndMinimum, 1>",
        "q5_0": "Packed<Whole<5, 16>, HalfScale, 1>",
        "q5_1": "Packed<Whole<5, 0>, HalfScaleAndMinimum, 1>",
        "q8_0": "Packed<Whole<8, 128>, HalfScale, 1>",
        "q2_k": "Packed<Pairs<2, 0>, NibbleHalves, 8>",
        "q3_k": "Packed<Pairs<3, 0, true>, SixBitHalves, 8>",
        "q4_k": "Packed<Whole<4, 0>, SixBitScales, 8>",
        "q5_k": "Packed<Whole<5, 0>, SixBitScales, 8>",
        "q6_k": "Packed<Whole<6, 0, true>, ByteScales, 8>",
        "iq4_nl": "Packed<Iq4, HalfScale, 1>",
        "iq4_xs": "Packed<Iq4, SixBitSteps, 8>",
        "tq2_0": "Packed<Pairs<2, 1>, HalfScale, 8>",
        "iq3_xxs": "Packed<SignedEntries<4, 0, true, false, 2>, Iq3XxsScales, 8>",
        "iq3_s": "Packed<SignedEntries<4, 1, false, false, 8>, StepNibbles, 8>",
        "iq2_xxs": "Packed<SignedEntries<8, 0, true, false, 1>, Iq2XxsScales, 8>",
        "iq2_xs": "Packed<SignedEntries<8, 0, true, true, 1>, HalfNibbles, 8>",
        "iq2_s": "Packed<SignedEntries<8, 2, false, false, 1>, HalfNibbles, 8>",
        "iq1_s": "Packed<ShiftedEntries<false>, Iq1SScales, 8>",
        "iq1_m": "Packed<ShiftedEntries<true>, PairScales, 8>",
        "mxfp4": "Packed<E2m1, E8m0Scale, 1>",
        "nvfp4": "Packed<E2m1, E4m3Scale, 1>",
        "nf4": "Packed<Nf4, HalfScale, 2>",
        **{name: _affine(codec) for name, codec in AFFINE.items()},
        **{name: kind for name, codec in PUBLISHED.items() if (kind := _published(codec))},
    }
)
"""C++ types by format name."""

HEAVY = frozenset({"q2_k", "q6_k", *CODEBOOKS})
"""Formats whose kernels need so many registers that only one block fits on a multiprocessor."""


PRODUCT_MACS = 16 * 32 * 8
"""Multiply-accumulates of one warp-level product: 16 weight rows, 32 columns, 8 activation rows."""
_INSTRUCTIONS = {
    **{"q4_k": 26, "q5_k": 28, "q6_k": 40, "q3_k": 41, "q2_k": 51, "nvfp4": 35},
    **{"iq2_xs": 45, "iq2_s": 45, "iq1_m": 46, "mxfp4": 23, "nf4": 23, "iq4_nl": 23},
}
_USUAL_INSTRUCTIONS = 25

_HALVES = ("NibbleHalves", "SixBitHalves", "ByteScales", "HalfNibbles", "PairScales", "E4m3Scale")


def is_packed(format_: Format, columns: int) -> bool:
    """Whether the kernels compute on the packed bytes of a matrix."""
    return format_.name in TYPES and columns % tile_span(format_) == 0


def format_macros(name: str) -> Mapping[str, str]:
    """The macros of a kernel for the format ``name``."""
    return {"FORMAT": TYPES[name], **({"ENTRIES": _entries(name)} if name in CODEBOOKS else {})}


@cache
def _entries(name: str) -> str:
    """A codebook in C++: one word per four columns of an entry."""
    book = CODEBOOKS[name]
    codes = book.codes + np.uint8(119) if book.shifted else book.entries
    words = np.ascontiguousarray(codes).view("<u4").reshape(-1)
    return "{" + ",".join(map(hex, words.tolist())) + "}"


def halves_steps(name: str) -> bool:
    """Whether each half of a step (16 columns) has its own scale."""
    return any(kind in TYPES[name] for kind in _HALVES)


def product_instructions(name: str) -> int:
    """Instructions per warp-level product in ``linear_many.cu``, unpacking included, on compute
    capability 8.9, counted in its machine code.
    """
    return _INSTRUCTIONS.get(name, _USUAL_INSTRUCTIONS)


def steps_at_once(name: str) -> int:
    """Steps of 32 columns that a chain computes per iteration."""
    return max(4, FORMATS[name].block // 32)
