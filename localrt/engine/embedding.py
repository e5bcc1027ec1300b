"""Texts to vectors: the hidden states after the final norm, pooled over a text's tokens.

It knows tokens and engines, neither text nor what a model was trained to be pooled by.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.engine.protocol import Check, Engine

__all__ = ["POOLINGS", "Pooling", "Rows", "embed", "unit_length"]

Rows: TypeAlias = npt.NDArray[np.float32]
Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


def embed(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
    *,
    check: Check | None = None,
) -> Rows:
    """The vectors (texts, D) of ``texts``, each its tokens, at least one.

    Raises:
        UnsupportedModelError: the engine gives no hidden states.
    """
    sums = np.zeros((len(texts), engine.hidden_size), np.float64)
    with closing(engine.hidden_states(texts, check=check)) as pieces:
        for index, rows in pieces:  # (n, D)
            if pooling == "mean":
                sums[index] += rows.sum(axis=0, dtype=np.float64)
            else:
                sums[index] = rows[-1]
    if pooling == "mean":
        sums /= np.array([[len(tokens)] for tokens in texts]).reshape(-1, 1)
    return sums.astype(np.float32)


def unit_length(vectors: Rows) -> Rows:
    """``vectors`` (n, D), each divided by its length."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    out: Rows = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return out
