"""The C++ type of each packed format (``quant/cuda/formats.cuh``): codes, scales, steps of a span.

This module imports nothing heavy: whether a format has a kernel can be asked anywhere.
"""

from __future__ import annotations

from types import MappingProxyType

from localrt.quant.formats.affine import AFFINE, AffineCodec

__all__ = ["TYPES", "steps_at_once"]

_SPANS = {**dict.fromkeys(("q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "tq2_0"), 8), "nf4": 2}


def _affine(codec: AffineCodec) -> str:
    if codec.minimum:
        return f"Packed<Whole<{codec.bits}, 0>, HalfScaleAndMinimum, {codec.group // 32}>"
    return f"Packed<Whole<{codec.bits}, {codec.zero}>, HalfScale, {codec.group // 32}>"


TYPES = MappingProxyType(
    {
        "q4_0": "Packed<Whole<4, 8>, HalfScale, 1>",
        "q4_1": "Packed<Whole<4, 0>, HalfScaleAndMinimum, 1>",
        "q5_0": "Packed<Whole<5, 16>, HalfScale, 1>",
        "q5_1": "Packed<Whole<5, 0>, HalfScaleAndMinimum, 1>",
        "q8_0": "Packed<Whole<8, 128>, HalfScale, 1>",
        "q3_k": "Packed<Pairs<3, 0, true>, SixBitHalves, 8>",
        "q4_k": "Packed<Whole<4, 0>, SixBitScales, 8>",
        "q5_k": "Packed<Whole<5, 0>, SixBitScales, 8>",
        "q6_k": "Packed<Whole<6, 0, true>, ByteScales, 8>",
        "iq4_nl": "Packed<Iq4, HalfScale, 1>",
        "iq4_xs": "Packed<Iq4, SixBitSteps, 8>",
        "tq2_0": "Packed<Pairs<2, 1>, HalfScale, 8>",
        "mxfp4": "Packed<E2m1, E8m0Scale, 1>",
        "nvfp4": "Packed<E2m1, E4m3Scale, 1>",
        "nf4": "Packed<Nf4, HalfScale, 2>",
        **{name: _affine(codec) for name, codec in AFFINE.items()},
    }
)
"""By the format's name."""


def steps_at_once(name: str) -> int:
    """Steps of 32 columns that a chain takes in one turn."""
    codec = AFFINE.get(name)
    return max(4, codec.group // 32 if codec is not None else _SPANS.get(name, 1))
