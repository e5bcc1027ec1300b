"""The weight formats of ggml that localrt reads, by name and by the number a GGUF file gives them.

A table only: block sizes and names. How the bytes of a block become numbers is in ``unpack.py``;
where they come from is the checkpoints' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from localrt.quant.formats.packed import Format

__all__ = [
    "BF16",
    "F16",
    "F32",
    "GGML_FORMATS",
    "GGML_UNREAD",
    "IQ1_M",
    "IQ1_S",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
    "IQ3_S",
    "IQ3_XXS",
    "IQ4_LEVELS",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "Q2_K",
    "Q3_K",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "TQ2_0",
]

F32 = Format("f32", 1, 4)
F16 = Format("f16", 1, 2)
BF16 = Format("bf16", 1, 2)
Q4_0 = Format("q4_0", 32, 18)  # scale f16, 16 bytes of nibbles
Q4_1 = Format("q4_1", 32, 20)  # scale f16, minimum f16, nibbles
Q5_0 = Format("q5_0", 32, 22)  # scale f16, 32 high bits, nibbles
Q5_1 = Format("q5_1", 32, 24)  # scale f16, minimum f16, 32 high bits, nibbles
Q8_0 = Format("q8_0", 32, 34)  # scale f16, 32 int8
Q2_K = Format("q2_k", 256, 84)  # 16 nibbles each of scales and minima, pairs of bits, two f16
Q3_K = Format("q3_k", 256, 110)  # 256 high bits, pairs of bits, 16 six-bit scales, f16
Q4_K = Format("q4_k", 256, 144)  # two f16, 8 six-bit scales and minima, nibbles
Q5_K = Format("q5_k", 256, 176)  # as Q4_K, and 256 high bits
Q6_K = Format("q6_k", 256, 210)  # low nibbles, high pairs of bits, 16 int8 scales, f16
IQ4_NL = Format("iq4_nl", 32, 18)  # as Q4_0, its nibbles 16 uneven levels
IQ4_XS = Format("iq4_xs", 256, 136)  # the same levels; f16, 8 six-bit scales
TQ2_0 = Format("tq2_0", 256, 66)  # pairs of bits, from -1 to 1, f16
IQ3_S = Format("iq3_s", 256, 110)  # indices of codebooks, signs, scales: see codebook.py
IQ3_XXS = Format("iq3_xxs", 256, 98)
IQ2_S = Format("iq2_s", 256, 82)
IQ2_XS = Format("iq2_xs", 256, 74)
IQ2_XXS = Format("iq2_xxs", 256, 66)
IQ1_M = Format("iq1_m", 256, 56)
IQ1_S = Format("iq1_s", 256, 50)
MXFP4 = Format("mxfp4", 32, 17)  # power-of-two scale e8m0, 32 e2m1

IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
IQ4_LEVELS.flags.writeable = False
"""What IQ4_NL's and IQ4_XS' codes stand for, before the scale."""

GGML_FORMATS: Mapping[int, Format] = MappingProxyType(
    {
        0: F32,
        1: F16,
        2: Q4_0,
        3: Q4_1,
        6: Q5_0,
        7: Q5_1,
        8: Q8_0,
        10: Q2_K,
        11: Q3_K,
        12: Q4_K,
        13: Q5_K,
        14: Q6_K,
        16: IQ2_XXS,
        17: IQ2_XS,
        18: IQ3_XXS,
        19: IQ1_S,
        20: IQ4_NL,
        21: IQ3_S,
        22: IQ2_S,
        23: IQ4_XS,
        29: IQ1_M,
        30: BF16,
        35: TQ2_0,
        39: MXFP4,
    }
)
"""What localrt reads, by ggml's type number."""

GGML_UNREAD: Mapping[int, Format] = MappingProxyType(
    {
        9: Format("q8_1", 32, 40),
        15: Format("q8_k", 256, 292),
        24: Format("i8", 1, 1),
        25: Format("i16", 1, 2),
        26: Format("i32", 1, 4),
        27: Format("i64", 1, 8),
        28: Format("f64", 1, 8),
        34: Format("tq1_0", 256, 54),
        40: Format("nvfp4", 64, 36),
        41: Format("q1_0", 128, 18),
    }
)
"""What ggml has and localrt cannot unpack: enough to place tensors, and to name them."""
