"""Several residual streams, per-layer inputs, and hashed n-grams.

Through a hyper-connection (Zhu et al. 2024, in the
gated form of Qwen3.8-Flash-Next) a layer reads a mixture of all streams, number by number, and each
stream takes its own share of what the layer gives.

Per-layer embeddings (Gemma 4): a table has P numbers of each token for each of L layers,
to which a projection of the token's embedding is added. A layer gates its part by what the residual
stream holds.

Hashed n-grams (Engram, Cheng et al. 2026, in the form of Qwen3.8-Flash-Next): a token's rows of the
table, side by side, are projected to a key for each stream and to one value. With g the product of
a stream's normed key and the normed stream over the root of D, the value is gated by ``sigmoid(
sign(g) sqrt(|g|))``. To these gated values the silu of a convolution over their norms is added,
channel by channel, and both to the streams.

Shapes: R rows, D hidden size, S streams, side by side in one array (R, S * D); K rank, L layers, P
numbers; E numbers of a token's n-grams, T taps. Knows neither layers nor tables nor tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.arrays import Vector, Weight


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class ConnectionWeights:
    """How a layer reads ``count`` streams; n are the streams, each normed by itself.

    The layer's input is the mean over streams of ``sigmoid(up(silu(down(n) / S))) * n``; a stream
    takes ``2 * sigmoid(share(n) / S)`` of its output. After the last layer there are no shares.
    """

    count: int
    norm: Vector  # (S * D,)
    down: Weight  # (K, S * D)
    up: Weight  # (S * D, K)
    share: Weight | None  # (S, S * D)
    eps: float


def rows_of_tokens(tokens: npt.NDArray[np.int64], each: int, rows: int) -> npt.NDArray[np.int64]:
    """The ``each`` rows of every token in a table of ``rows``, (R * each,).

    A token that the table lacks gets the first token's rows.
    """
    known = np.where(tokens < rows // each, tokens, 0)
    return (known[:, None] * each + np.arange(each)).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProjection:
    """The projection of embeddings, normed over P numbers, that is added to the tables' rows."""

    matrix: Weight  # (L * P, D)
    norm: Vector  # (P,)
    width: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGateSpec:
    """Layer ``layer``'s gate on its ``width`` numbers."""

    layer: int
    width: int
    activation: Literal["silu", "gelu_tanh"]
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class InputGateWeights:
    """``norm(out(activation(gate(x)) * inputs))``."""

    gate: Weight  # (P, D)
    out: Weight  # (D, P)
    post_norm: Vector  # (D,)


LEAST_PRODUCT = 1e-6
"""Of a key with a stream, whatever its sign."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
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
