"""NF4: sixteen quantiles of a normal distribution, in groups of 64 with a half-precision absmax.

The levels are those that QLoRA (Dettmers et al. 2023) publishes. Scales are halves, 4.25 bits per
weight in all: quantizing the scales too would save 0.12 bits and cost every kernel a second level.
A block is the scale and 32 bytes of nibbles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localrt.quant.formats.codec import (
    Bytes,
    Floats,
    half_bytes,
    half_values,
    join_nibbles,
    nearest,
    over,
    split_nibbles,
    to_half,
)
from localrt.quant.formats.packed import Format

__all__ = ["NF4", "NF4_CODEC", "NF4_LEVELS"]

NF4 = Format("nf4", 64, 34)

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

_nearest_level = nearest(NF4_LEVELS)


@dataclass(frozen=True, slots=True)
class Nf4Codec:
    """See the ``Codec`` protocol. Scales are (n, 1)."""

    format: Format = NF4

    @property
    def shrinks(self) -> tuple[float, ...]:
        """A hundred steps from the whole range down to a fifth of it."""
        return tuple(np.linspace(1.0, 0.2, 100).tolist())

    @property
    def group(self) -> int:
        """Columns that share a scale: a block."""
        return self.format.block

    def tensor_scale(self, largest: float) -> float:
        """None: groups have all they need."""
        return 1.0

    def fit(self, groups: Floats, shrink: float = 1.0) -> Floats:
        """The largest magnitude."""
        return to_half(np.abs(groups).max(axis=1, keepdims=True) * np.float32(shrink))

    def encode(self, values: Floats, scales: Floats) -> Bytes:
        """Nearest codes."""
        return _nearest_level(over(values, scales))

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        """Level times scale."""
        return NF4_LEVELS[codes] * scales

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """Scale, nibbles."""
        return np.concatenate([half_bytes(scales), join_nibbles(codes)], axis=1)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        """The inverse of ``join``."""
        return split_nibbles(blocks[:, 2:]), half_values(blocks[:, :2])


NF4_CODEC = Nf4Codec()
