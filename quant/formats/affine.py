"""Group-wise affine quantization: int4 to int8 codes with a half-precision scale, some a minimum.

``int4-g32`` is symmetric: value = scale * (code - 8); the group's extreme maps to the lowest code,
so the scale has the opposite sign. ``int4-g32m`` has a minimum: value = scale * code + minimum. A
block is one group: scale, minimum (if any), low nibbles (bytes for int8), high bits. int4-g32 is
byte for byte ggml's Q4_0, and int4-g32m its Q4_1.

These formats are the ones that models are published in, or the best measured at their size:

    int4, int8 in groups of 32, 64, 128   published by GPTQ and compressed-tensors, symmetric
    the same with a minimum               published by AWQ, and GPTQ with zero points
    int5-g32, int6-g32                    best at 5.5 and 6.5 bits

Nobody publishes groups of 16, nor other kinds of five and six bits (GGUF's types have formats of
their own).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from localrt.quant.formats.packed import (
    HALF,
    HALVES,
    Bytes,
    Floats,
    Format,
    half_bytes,
    half_values,
    join_nibbles,
    over,
    split_nibbles,
    to_half,
)

_BITS = (4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_PAIR_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


@dataclass(frozen=True, slots=True)
class AffineCodec:
    """See the ``Codec`` protocol. Scales are (n, 1), or (n, 2) with the minimum second."""

    bits: int
    group: int
    minimum: bool

    def __post_init__(self) -> None:
        if self.bits not in _BITS or self.group not in _GROUPS:
            raise ValueError(f"no affine format has {self.bits} bits in groups of {self.group}")

    @property
    def format(self) -> Format:
        """``int4-g32``, ``int4-g32m``."""
        name = f"int{self.bits}-g{self.group}{'m' if self.minimum else ''}"
        nbytes = self._header + self.group * self.bits // 8
        return Format(name, self.group, nbytes, self.bits, HALVES if self.minimum else HALF)

    @property
    def shrinks(self) -> tuple[float, ...]:
        """A hundred factors from 1 down to 0.2."""
        return tuple(np.linspace(1.0, 0.2, 100).tolist())

    @property
    def zero(self) -> int:
        """The code of zero in a symmetric format."""
        return 0 if self.minimum else 1 << (self.bits - 1)

    @property
    def _header(self) -> int:
        return 4 if self.minimum else 2

    def tensor_scale(self, largest: float) -> float:
        return 1.0

    def fit(self, groups: Floats, shrink: float = 1.0) -> Floats:
        """Map the group's extreme to the lowest code, or its minimum and maximum to the end codes.

        A range with a minimum shrinks towards the group's mean.
        """
        if not self.minimum:
            at = np.abs(groups).argmax(axis=1)[:, None]
            extreme = np.take_along_axis(groups, at, axis=1)
            return to_half(extreme * np.float32(-shrink / self.zero))
        low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
        if shrink != 1.0:
            mean = groups.mean(axis=1, keepdims=True)
            low, high = (mean + np.float32(shrink) * (end - mean) for end in (low, high))
        steps = np.float32((1 << self.bits) - 1)
        return to_half(np.concatenate([high / steps - low / steps, low], axis=1))

    def encode(self, values: Floats, scales: Floats) -> Bytes:
        """Nearest codes; ties go to the even one."""
        if self.minimum:
            values = values - scales[:, 1:]
        codes = np.rint(over(values, scales[:, :1]))
        codes += self.zero
        return np.clip(codes, 0, (1 << self.bits) - 1, out=codes).astype(np.uint8)

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        """Convert codes to values, in ggml's order of operations."""
        values = codes.astype(np.float32)
        if self.minimum:
            values *= scales[:, :1]
            values += scales[:, 1:]
        else:
            values -= self.zero
            values *= scales
        return values

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """Scale, minimum, low nibbles, high bits."""
        parts = [half_bytes(scales), codes if self.bits == 8 else join_nibbles(codes)]
        if self.bits == 5:  # bit i of the high bits belongs to code i
            parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
        if self.bits == 6:  # pair p of byte j belongs to code p * group / 4 + j
            pairs = (codes >> 4).reshape(-1, 4, self.group // 4) << _PAIR_SHIFTS
            parts.append(np.bitwise_or.reduce(pairs, axis=1))
        return np.concatenate(parts, axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        scales, body = half_values(blocks[:, : self._header]), blocks[:, self._header :]
        if self.bits == 8:
            return body, scales
        low, high = body[:, : self.group // 2], body[:, self.group // 2 :]
        codes = split_nibbles(low)
        if self.bits == 5:
            codes |= np.unpackbits(high, axis=1, bitorder="little") << 4
        if self.bits == 6:
            pairs = (high[:, None] >> _PAIR_SHIFTS) & 3
            codes |= pairs.reshape(-1, self.group) << 4
        return codes, scales


_KEPT = (
    *((bits, group, minimum) for bits in (4, 8) for group in _GROUPS for minimum in (False, True)),
    (5, 32, False),
    (6, 32, False),
)

AFFINE: Mapping[str, AffineCodec] = MappingProxyType(
    {codec.format.name: codec for codec in (AffineCodec(*kept) for kept in _KEPT)}
)
"""Every affine format by its name."""
