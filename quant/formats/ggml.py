"""ggml's weight formats by name and by their number in GGUF files, and codecs of three of them.

``convert.py`` decodes blocks; checkpoint readers know where bytes come from. localrt packs Q2_K and
Q3_K, or IQ4_NL for rows of partial blocks. Q2_K and Q3_K are blocks of 256: sixteen groups with
scales of a few bits each. Q3_K: value = d * scale * (code - 4), with a six-bit scale from -32 to
31. Q2_K: value = d * scale * code - dmin * minimum, with four bits of each. A group's numbers are d
and scale, or d, scale, dmin and minimum; the groups of a block share d and dmin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from localrt.quant.formats.packed import (
    HALF,
    HALVES,
    BlockCodec,
    Bytes,
    Floats,
    Format,
    LevelCodec,
    Ranges,
    half_bytes,
    half_values,
    nearest,
    over,
    to_half,
)
from localrt.quant.formats.six_bits import join_six_bits, six_bit_scales


def _bytes(start: int) -> Ranges:
    """Ranges of sixteen one-byte fields."""
    return tuple((at, at + 1) for at in range(start, start + 16))


F32 = Format("f32", 1, 4, 32, ((0, 4),), ggml_type=0)
F16 = Format("f16", 1, 2, 16, HALF, ggml_type=1)
BF16 = Format("bf16", 1, 2, 16, HALF, ggml_type=30)
Q4_0 = Format("q4_0", 32, 18, 4, HALF, zero=8, ggml_type=2)  # scale f16, 16 bytes of nibbles
Q4_1 = Format("q4_1", 32, 20, 4, HALVES, zero=0, ggml_type=3)  # scale f16, minimum f16, nibbles
Q5_0 = Format("q5_0", 32, 22, 5, HALF, zero=16, ggml_type=6)  # scale f16, 32 high bits, nibbles
# scale f16, minimum f16, 32 high bits, nibbles
Q5_1 = Format("q5_1", 32, 24, 5, HALVES, zero=0, ggml_type=7)
Q8_0 = Format("q8_0", 32, 34, 8, HALF, zero=128, ggml_type=8)  # scale f16, 32 int8
# 16 nibbles each of scales and minima, pairs of bits, two f16
Q2_K = Format("q2_k", 256, 84, 2, ((80, 82), (82, 84), *_bytes(0)), ggml_type=10)
# 256 high bits, pairs of bits, 16 six-bit scales, f16
Q3_K = Format("q3_k", 256, 110, 3, ((108, 110), (96, 108)), ggml_type=11)
# two f16, 8 six-bit scales and minima, nibbles
Q4_K = Format("q4_k", 256, 144, 4, (*HALVES, (4, 16)), zero=0, ggml_type=12)
# as Q4_K, and 256 high bits
Q5_K = Format("q5_k", 256, 176, 5, (*HALVES, (4, 16)), zero=0, ggml_type=13)
# low nibbles, high pairs of bits, 16 int8 scales, f16
Q6_K = Format("q6_k", 256, 210, 6, ((208, 210), *_bytes(192)), zero=32, ggml_type=14)
IQ4_NL = Format("iq4_nl", 32, 18, 4, HALF, ggml_type=20)  # Q4_0 with 16 uneven levels
# the same levels; f16, 8 six-bit scales
IQ4_XS = Format("iq4_xs", 256, 136, 4, (*HALF, (2, 8)), ggml_type=23)
# pairs of bits, from -1 to 1, f16
TQ2_0 = Format("tq2_0", 256, 66, 2, ((64, 66),), zero=1, ggml_type=35)
MXFP4 = Format("mxfp4", 32, 17, 4, ((0, 1),), ggml_type=39)  # power-of-two scale e8m0, 32 e2m1
_CODEBOOKS = (  # indices of codebooks, signs, scales: see codebook.py
    Format("iq2_xxs", 256, 66, ggml_type=16),
    Format("iq2_xs", 256, 74, ggml_type=17),
    Format("iq3_xxs", 256, 98, ggml_type=18),
    Format("iq1_s", 256, 50, ggml_type=19),
    Format("iq3_s", 256, 110, ggml_type=21),
    Format("iq2_s", 256, 82, ggml_type=22),
    Format("iq1_m", 256, 56, ggml_type=29),
)
_PLAIN = (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)
_READ = (*_PLAIN, IQ4_NL, IQ4_XS, TQ2_0, MXFP4, *_CODEBOOKS)
_NUMBERS = {format_.ggml_type: format_ for format_ in _READ if format_.ggml_type is not None}
GGML_FORMATS: Mapping[int, Format] = MappingProxyType(dict(sorted(_NUMBERS.items())))
"""The formats that localrt reads, by ggml's type number."""
IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
IQ4_LEVELS.flags.writeable = False
"""Values of IQ4_NL's and IQ4_XS's codes, before the scale."""
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
"""ggml types that localrt cannot unpack, with sizes to locate tensors."""
_BLOCK, _GROUPS = 256, 16
_HALVES, _PAIRS = 2, np.array([0, 2, 4, 6], np.uint8)


@dataclass(frozen=True, slots=True)
class KQuantCodec(BlockCodec):
    """See the ``Codec`` protocol. A block's scales are (n, 16 * k), those of a group (n, k).

    Q3_K: k = 2: d, scale; Q2_K: k = 4: d, scale, dmin, minimum.
    """

    format: Format

    @property
    def minimum(self) -> bool:
        """Whether groups have a minimum."""
        return self.format == Q2_K

    @property
    def group(self) -> int:
        return _BLOCK // _GROUPS

    @property
    def numbers(self) -> int:
        """k, per group."""
        return 4 if self.minimum else 2

    @property
    def most(self) -> int:
        """The highest code."""
        return 3 if self.minimum else 7

    @property
    def shrinks(self) -> tuple[float, ...]:
        """Factors to try on the scale that clips nothing."""
        return tuple(np.linspace(1.15, 0.5, 27).tolist())

    def fit(self, groups: Floats, shrink: float = 1.0) -> Floats:
        """Scales of blocks (n, 256) that cover each group's range."""
        parts = groups.reshape(-1, _GROUPS, self.group)
        if self.minimum:
            low = np.minimum(parts.min(axis=2), 0)
            steps = (np.maximum(parts.max(axis=2), 0) - low) * np.float32(shrink / self.most)
            return self.join_scales(steps, -low)
        at = np.abs(parts).argmax(axis=2)[:, :, None]
        extreme = np.take_along_axis(parts, at, axis=2)[:, :, 0]
        return self.join_scales(extreme * np.float32(-shrink / 4))

    def join_scales(self, steps: Floats, minima: Floats | None = None) -> Floats:
        """The nearest representable scales (n, 16 * k) to those wanted (n, 16)."""
        d, scale = _shared(steps, 15 if self.minimum else 32)
        if minima is None:
            parts = [d, scale]
        else:
            least, minimum = _shared(minima, 15)
            parts = [d, scale, least, minimum]
        whole = [np.broadcast_to(part, steps.shape) for part in parts]
        return np.stack(whole, axis=2).reshape(len(steps), -1)

    def encode(self, values: Floats, scales: Floats) -> Bytes:
        """Nearest codes; ties go to the even one."""
        if values.shape[1] == _BLOCK and scales.shape[1] == _GROUPS * self.numbers:
            groups = values.reshape(-1, self.group)
            return self.encode(groups, scales.reshape(-1, self.numbers)).reshape(values.shape)
        if self.minimum:
            values = values + scales[:, 2:3] * scales[:, 3:]
        codes = np.rint(over(values, np.broadcast_to(self._step(scales), values.shape)))
        if not self.minimum:
            codes += 4
        return np.clip(codes, 0, self.most, out=codes).astype(np.uint8)

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        """Codes to values, in ggml's order of operations."""
        if codes.shape[1] == _BLOCK and scales.shape[1] == _GROUPS * self.numbers:
            groups = codes.reshape(-1, self.group)
            return self.decode(groups, scales.reshape(-1, self.numbers)).reshape(codes.shape)
        values = codes.astype(np.float32)
        if not self.minimum:
            values -= 4
            values *= self._step(scales)
            return values
        values *= self._step(scales)
        values -= scales[:, 2:3] * scales[:, 3:]
        return values

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """ggml's block."""
        of_groups = scales.reshape(-1, _GROUPS, self.numbers)
        # Byte j of a half has the low bits of weights j, j + 32, j + 64 and j + 96 of it.
        pairs = (codes & 3).reshape(-1, _HALVES, 4, 32) << _PAIRS[:, None]
        low = np.bitwise_or.reduce(pairs, axis=2).reshape(-1, 64)
        d, scale = half_bytes(of_groups[:, 0, :1]), of_groups[:, :, 1]
        if self.minimum:
            nibbles = scale.astype(np.uint8) | of_groups[:, :, 3].astype(np.uint8) << 4
            least = half_bytes(of_groups[:, 0, 2:3])
            return np.concatenate([nibbles, low, d, least], axis=1)
        high = np.packbits(codes.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little")[:, 0]
        six = join_six_bits((scale + 32).astype(np.uint8))
        return np.concatenate([high, low, six, d], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        low = blocks[:, 16:80] if self.minimum else blocks[:, 32:96]
        pairs = low.reshape(-1, _HALVES, 1, 32) >> _PAIRS[:, None] & 3
        codes = pairs.reshape(-1, _BLOCK).astype(np.uint8)
        if self.minimum:
            nibbles = blocks[:, :16]
            parts = [half_values(blocks[:, 80:82]), nibbles & 15]
            parts += [half_values(blocks[:, 82:84]), nibbles >> 4]
        else:
            high = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little")
            codes |= high.reshape(-1, _BLOCK) << 2
            six = six_bit_scales("q3_k", blocks[:, 96:108]).astype(np.float32) - 32
            parts = [half_values(blocks[:, 108:110]), six]
        whole = [np.broadcast_to(part, (len(blocks), _GROUPS)) for part in parts]
        return codes, np.stack(whole, axis=2).reshape(len(blocks), -1).astype(np.float32)

    def _step(self, scales: Floats) -> Floats:
        return scales[:, :1] * scales[:, 1:2]


def _shared(wanted: Floats, most: int) -> tuple[Floats, Floats]:
    """d (n, 1) in half precision and integers (n, 16) up to ``most``, such that wanted = d *
    integer.

    If ``most`` is 32, integers are from -32 to 31, and the extreme is -32.
    """
    at = np.abs(wanted).argmax(axis=1)[:, None]
    extreme = np.take_along_axis(wanted, at, axis=1)
    signed = most == 32
    d = to_half(extreme / np.float32(-most if signed else most))
    with np.errstate(invalid="ignore"):
        numbers = np.rint(over(wanted, np.broadcast_to(d, wanted.shape)))
    return d, np.clip(numbers, -32 if signed else 0, 31 if signed else most)


@dataclass(frozen=True, slots=True)
class Iq4NlCodec(LevelCodec):
    """See the ``Codec`` protocol: a scale (n, 1) for 32 weights."""

    format: Format = IQ4_NL
    levels = IQ4_LEVELS
    nearest_level = staticmethod(nearest(IQ4_LEVELS))

    @property
    def numbers(self) -> int:
        """Scales per group."""
        return 1

    @property
    def shrinks(self) -> tuple[float, ...]:
        """Factors to try on the scale that clips nothing."""
        return tuple(np.linspace(1.1, 0.6, 26).tolist())

    def fit(self, groups: Floats, shrink: float = 1.0) -> Floats:
        """Map the group's extreme to the lowest (largest) level."""
        at = np.abs(groups).argmax(axis=1)[:, None]
        extreme = np.take_along_axis(groups, at, axis=1)
        return to_half(extreme * np.float32(shrink) / IQ4_LEVELS[0])


GGUF_CODECS: Mapping[str, KQuantCodec | Iq4NlCodec] = MappingProxyType(
    {"q2_k": KQuantCodec(Q2_K), "q3_k": KQuantCodec(Q3_K), "iq4_nl": Iq4NlCodec()}
)
"""Codecs by format name."""
