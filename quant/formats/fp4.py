"""FP4 weights (E2M1) with power-of-two or E4M3 scales, and NF4 with a half-precision absmax.

MXFP4 (OCP microscaling, groups of 32) has ggml's block: an E8M0 exponent and 16 bytes of nibbles.
NVFP4 (groups of 16) has an E4M3 scale and 8 bytes of nibbles, and one float32 factor per tensor,
``PackedTensor.scale``. ggml's own type of that name has other blocks and is not read here. NF4's
levels are sixteen quantiles of a normal distribution, those that QLoRA (Dettmers et al. 2023)
publishes, in groups of 64: 4.25 bits per weight in all. Quantizing the scales too would save 0.12
bits and cost every kernel a second level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localrt.quant.formats.ggml import MXFP4
from localrt.quant.formats.packed import (
    HALF,
    BlockCodec,
    Bytes,
    Floats,
    Format,
    LevelCodec,
    join_nibbles,
    nearest,
    over,
    split_nibbles,
    to_half,
)

NVFP4 = Format("nvfp4", 16, 9, 4, ((0, 1),))
F8_E4M3 = Format("f8_e4m3", 1, 1, 8, ((0, 1),))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E2M1.flags.writeable = False
"""The value of each E2M1 code; bit 3 is the sign."""


def _e4m3_table() -> Floats:
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3_table()
E4M3.flags.writeable = False
"""The value of each E4M3 byte (the variant without infinities)."""
_LARGEST = float(E2M1[7])
_LARGEST_SCALE = float(E4M3[126])
_nearest_magnitude = nearest(E2M1[:8])
_nearest_e4m3 = nearest(E4M3[:127])


class _E2m1Codec(BlockCodec):
    """E2M1 codes times scales, which is exact."""

    __slots__ = ()

    def encode(self, values: Floats, scales: Floats) -> Bytes:
        """Nearest codes; ties go towards zero, and zero is code 0."""
        codes = _nearest_magnitude(over(np.abs(values), scales))
        codes |= ((values < 0) & (codes > 0)).view(np.uint8) << 3
        return codes

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        return E2M1[codes] * scales


@dataclass(frozen=True, slots=True)
class Mxfp4Codec(_E2m1Codec):
    """See the ``Codec`` protocol. Scales are (n, 1) powers of two."""

    format: Format = MXFP4
    shrinks: tuple[float, ...] = (2.0, 1.0, 0.5)  # scales are powers of two: adjacent exponents

    def fit(self, groups: Floats, shrink: float = 1.0) -> Floats:
        """Map the extreme to between 4 and 8, as OCP specifies; values above 6 are clipped."""
        extreme = np.abs(groups).max(axis=1, keepdims=True) * np.float64(shrink)
        _, exponent = np.frexp(extreme)
        exponent = np.where(extreme > 0, exponent - 3, -127)
        scales: Floats = np.ldexp(np.float32(1), np.clip(exponent, -127, 127))
        return scales.astype(np.float32, copy=False)

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """Exponent, nibbles."""
        exponents = (np.frexp(scales)[1] + 126).astype(np.uint8)
        return np.concatenate([exponents, join_nibbles(codes)], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
        return split_nibbles(blocks[:, 1:]), scales.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Nvfp4Codec(_E2m1Codec):
    """See the ``Codec`` protocol. Scales are (n, 1), before the tensor's own factor."""

    format: Format = NVFP4

    @property
    def shrinks(self) -> tuple[float, ...]:
        """Factors, also above 1: an extreme at 4 instead of 6 leaves finer levels around it.

        E4M3 has eight values per octave, so sixteen factors per octave miss none.
        """
        return tuple(np.geomspace(1.6, 0.4, 33).tolist())

    def tensor_scale(self, largest: float) -> float:
        """The factor that maps the tensor's extreme to the largest scale and the largest code."""
        scale = float(np.float32(largest / (_LARGEST * _LARGEST_SCALE)))
        return scale if scale > 0 else 1.0

    def fit(self, groups: Floats, shrink: float = 1.0) -> Floats:
        """Map the extreme to 6."""
        extreme = np.abs(groups).max(axis=1, keepdims=True)
        return E4M3[_nearest_e4m3(extreme * np.float32(shrink / _LARGEST))]

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        return np.concatenate([_nearest_e4m3(scales), join_nibbles(codes)], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        return split_nibbles(blocks[:, 1:]), E4M3[blocks[:, :1]]


MXFP4_CODEC = Mxfp4Codec()
NVFP4_CODEC = Nvfp4Codec()
NF4 = Format("nf4", 64, 34, 4, HALF)
NF4_LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
NF4_LEVELS.flags.writeable = False
"""The value of each code, before the scale."""


@dataclass(frozen=True, slots=True)
class Nf4Codec(LevelCodec):
    """See the ``Codec`` protocol. Scales are (n, 1)."""

    format: Format = NF4
    levels = NF4_LEVELS
    nearest_level = staticmethod(nearest(NF4_LEVELS))

    @property
    def shrinks(self) -> tuple[float, ...]:
        """A hundred factors from 1 down to 0.2."""
        return tuple(np.linspace(1.0, 0.2, 100).tolist())

    def fit(self, groups: Floats, shrink: float = 1.0) -> Floats:
        """Each group's largest magnitude."""
        return to_half(np.abs(groups).max(axis=1, keepdims=True) * np.float32(shrink))


NF4_CODEC = Nf4Codec()
