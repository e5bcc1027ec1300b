"""Several residual streams: Gemma 3n's AltUp with its LAuReL, and hyper-connections.

In AltUp a layer first predicts all streams, each from all of them, runs on the predicted active
one, and then corrects every stream by what the layer made of it (Alternating Updates, Baykal et al.
2023). Coefficients are linear in the tanh of a router's products. Beside attention runs a learned
residual of low rank (LAuReL, Menghani et al. 2024).

Through a hyper-connection (Zhu et al. 2024, in the gated form of Qwen3.8-Flash-Next) a layer reads
a mixture of all streams, number by number, and each stream takes its own share of what the layer
gives. Knows no layers.

Shapes: R rows, D hidden size, S streams, side by side in one array (R, S * D); K rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrt.quant.ops.arrays import Vector, Weight

__all__ = ["ConnectionWeights", "LowRankWeights", "StreamSpec", "StreamWeights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """How many streams there are, and which is active. ``eps`` is of the routers' norms."""

    count: int
    active: int
    eps: float

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.count:
            raise ValueError(f"the active stream must be below {self.count}, is {self.active}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWeights:
    """One layer's router of streams, with the coefficients of predictions or of corrections."""

    norm: Vector  # (D,), times what the router's input is scaled by
    router: Weight  # (S, D)
    coefficients: Vector  # (S * S * S,) of predictions, (S * S,) of corrections
    scale: Vector | None = None  # (D,), of the active stream for what follows the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankWeights:
    """``n + norm(right(left(n)))``, where n is the normed input."""

    norm: Vector  # (D,)
    left: Weight  # (K, D)
    right: Weight  # (D, K)
    post_norm: Vector  # (D,)
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionWeights:
    """How a layer reads ``count`` streams, n of which are normed each for itself.

    The layer's input is the mean over streams of ``sigmoid(up(silu(down(n) / S))) * n``; a stream
    takes ``2 * sigmoid(share(n) / S)`` of its output. Behind the last layer nothing is shared out.
    """

    count: int
    norm: Vector  # (S * D,)
    down: Weight  # (K, S * D)
    up: Weight  # (S * D, K)
    share: Weight | None  # (S, S * D)
    eps: float
