"""What a layer makes of hashed n-grams, for several residual streams (Engram, Cheng et al. 2026, in
the form of Qwen3.8-Flash-Next).

A token's rows of the table, side by side, are projected to a key for each stream and to one value.
What a stream's normed key has in common with the normed stream decides how much of the value it
gets: with g their product over the root of D, ``sigmoid(sign(g) sqrt(|g|))``. To these gated values
the silu of a convolution over their norms is added, channel by channel, and both to the streams.

Shapes: R rows, D hidden size, S streams, side by side (R, S * D); E numbers of a token's n-grams, T
taps.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrt.quant.ops.arrays import Vector, Weight

__all__ = ["LEAST_PRODUCT", "NgramWeights"]

LEAST_PRODUCT = 1e-6
"""Of a key with a stream, whatever its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramWeights:
    """One layer's n-grams, of ``count`` streams. Norms are each stream's own."""

    count: int
    key: Weight  # (S * D, E)
    value: Weight  # (D, E)
    key_norm: Vector  # (S * D,)
    stream_norm: Vector  # (S * D,)
    value_norm: Vector  # (S * D,)
    taps: Vector  # (T, S * D): the oldest row's first
    eps: float
