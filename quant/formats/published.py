"""Formats of published groups that ours cannot hold: other scales, zero points, E4M3 codes.

    int4-g64b     scale and minimum in bfloat16: symmetric codes are scale * code - 8 * scale
    int4-g128z    a float32 scale and a zero point in a byte: AWQ, GPTQ and compressed-tensors
    nf4-f32       NF4 with a float32 absmax: bitsandbytes, whose double quantization needs it
    fp4-f32       bitsandbytes' FP4, whose smallest level is not E2M1's
    e4m3-g128     a float32 scale and E4M3 codes: FP8 with a scale per block, row or tensor

A block is one group: its scale, its minimum or zero point, its codes. localrt reads these formats
and computes with them, but does not quantize to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from localrt.quant.formats.fp4 import E4M3, NF4_LEVELS
from localrt.quant.formats.packed import (
    HALVES,
    Bytes,
    Floats,
    Format,
    GroupCodec,
    Ranges,
    join_nibbles,
    split_nibbles,
)

GROUPS = (128, 64, 32)
"""Columns that share a scale, the largest first."""
_FLOAT: Ranges = ((0, 4),)


@dataclass(frozen=True, slots=True)
class BrainCodec:
    """``int4-g64b``: value = scale * code + minimum. Scales are (n, 2), the minimum second."""

    bits: int
    group: int

    @property
    def format(self) -> Format:
        name, nbytes = f"int{self.bits}-g{self.group}b", 4 + self.group * self.bits // 8
        return Format(name, self.group, nbytes, self.bits, HALVES)

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        """One product and one sum, each rounded."""
        return codes.astype(np.float32) * scales[:, :1] + scales[:, 1:]

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """Scale, minimum, codes. Scales are truncated to bfloat16."""
        halves = (np.ascontiguousarray(scales, np.float32).view(np.uint32) >> 16).astype("<u2")
        return np.concatenate([halves.view(np.uint8), _packed(codes, self.bits)], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        halves = np.ascontiguousarray(blocks[:, :4]).view("<u2").astype(np.uint32)
        return _unpacked(blocks[:, 4:], self.bits), (halves << 16).view(np.float32)


@dataclass(frozen=True, slots=True)
class ZeroPointCodec:
    """``int4-g128z``: value = scale * (code - zero). Scales are (n, 2), the zero point second."""

    bits: int
    group: int

    @property
    def format(self) -> Format:
        name, nbytes = f"int{self.bits}-g{self.group}z", 5 + self.group * self.bits // 8
        return Format(name, self.group, nbytes, self.bits, (*_FLOAT, (4, 5)))

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        """An integer difference, then one product."""
        return (codes.astype(np.float32) - scales[:, 1:]) * scales[:, :1]

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """Scale, zero point, codes."""
        parts = [_float_bytes(scales[:, :1]), scales[:, 1:].astype(np.uint8)]
        return np.concatenate([*parts, _packed(codes, self.bits)], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        scales = [_float_values(blocks[:, :4]), blocks[:, 4:5].astype(np.float32)]
        return _unpacked(blocks[:, 5:], self.bits), np.concatenate(scales, axis=1)


_FP4_MAGNITUDES = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
FP4_LEVELS = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES])
"""bitsandbytes' FP4 by code; the sign is the highest bit."""
FP4_LEVELS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class LevelFloatCodec:
    """``nf4-f32``, ``fp4-f32``: value = level * scale. Scales are (n, 1)."""

    kind: str  # "nf4" or "fp4"

    @property
    def format(self) -> Format:
        return Format(f"{self.kind}-f32", 64, 36, 4, _FLOAT)

    @property
    def levels(self) -> Floats:
        """The sixteen levels by code."""
        return NF4_LEVELS if self.kind == "nf4" else FP4_LEVELS

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        return self.levels[codes] * scales

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        return np.concatenate([_float_bytes(scales), join_nibbles(codes)], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        return split_nibbles(blocks[:, 4:]), _float_values(blocks[:, :4])


@dataclass(frozen=True, slots=True)
class E4m3Codec:
    """``e4m3-g128``: value = E4M3 * scale. Scales are (n, 1)."""

    group: int

    @property
    def format(self) -> Format:
        return Format(f"e4m3-g{self.group}", self.group, 4 + self.group, 8, _FLOAT)

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        return E4M3[codes] * scales

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """Scale, codes."""
        return np.concatenate([_float_bytes(scales), codes], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        return blocks[:, 4:], _float_values(blocks[:, :4])


def _float_bytes(values: Floats) -> Bytes:
    """Columns (n, k) as bytes (n, 4k), little-endian."""
    return np.ascontiguousarray(values, dtype="<f4").view(np.uint8)


def _float_values(packed: Bytes) -> Floats:
    return np.ascontiguousarray(packed).view("<f4").astype(np.float32, copy=False)


def _packed(codes: Bytes, bits: int) -> Bytes:
    return codes if bits == 8 else join_nibbles(codes)


def _unpacked(packed: Bytes, bits: int) -> Bytes:
    return packed if bits == 8 else split_nibbles(packed)


_ALL: tuple[GroupCodec, ...] = (
    *(BrainCodec(bits, group) for bits in (4, 8) for group in GROUPS),
    *(ZeroPointCodec(bits, group) for bits in (4, 8) for group in GROUPS),
    *(E4m3Codec(group) for group in GROUPS),
    LevelFloatCodec("nf4"),
    LevelFloatCodec("fp4"),
)

PUBLISHED: Mapping[str, GroupCodec] = MappingProxyType({codec.format.name: codec for codec in _ALL})
"""These formats by name."""
