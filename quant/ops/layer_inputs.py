"""Inputs that every layer has of its own: a token's numbers for it, beside the residual stream.

Gemma 3n's and Gemma 4's per-layer embeddings: a table has P numbers of each token for each of L
layers, to which a projection of the token's embedding is added. A layer gates its part by what the
residual stream holds. Knows neither tables nor tokens.

Shapes: R rows, D hidden size, L layers, P numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.arrays import Vector, Weight

__all__ = ["InputGateSpec", "InputGateWeights", "InputProjection", "rows_of_tokens"]


def rows_of_tokens(tokens: npt.NDArray[np.int64], each: int, rows: int) -> npt.NDArray[np.int64]:
    """The ``each`` rows of every token in a table of ``rows``, (R * each,).

    A token that the table lacks has the first one's.
    """
    known = np.where(tokens < rows // each, tokens, 0)
    return (known[:, None] * each + np.arange(each)).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProjection:
    """What embeddings add to the tables' rows: their projection, normed by P."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGateWeights:
    """``norm(out(activation(gate(x)) * inputs))``."""

    gate: Weight  # (P, D)
    out: Weight  # (D, P)
    post_norm: Vector  # (D,)
