"""Texts to vectors: the hidden states after the final norm, pooled over a text's tokens.

Texts share passes, as many rows as a pass takes; long ones go on from pass to pass. It knows tokens
and engines, neither text nor what a model was trained to be pooled by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from localrt.engine.protocol import Check, EngineInfo, Logits
from localrt.quant.ops.protocol import Batch, KVCache

__all__ = ["POOLINGS", "EmbeddingEngine", "HiddenEngine", "Pooling", "Rows", "embed", "unit_length"]

Rows: TypeAlias = npt.NDArray[np.float32]
Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


@runtime_checkable
class HiddenEngine(Protocol):
    """An engine whose passes give their hidden states."""

    @property
    def pass_rows(self) -> int:
        """The most rows of one pass."""

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states."""

    def final_norm(self) -> tuple[Rows, float]:
        """The weights (D,) and the epsilon of the norm before the head."""

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache."""

    def run(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
        features: Logits | None = None,
    ) -> Logits:
        """One pass; ``features`` (R, D) gets the hidden states before the final norm."""


@runtime_checkable
class EmbeddingEngine(Protocol):
    """An engine that has hidden states after the final norm itself."""

    @property
    def info(self) -> EngineInfo:
        """What runs."""

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states."""

    def hidden_states(
        self, tokens: Sequence[int], check: Check | None
    ) -> Generator[Rows, None, None]:
        """Those of ``tokens``, in order, in pieces (n, D)."""


def embed(
    engine: HiddenEngine | EmbeddingEngine,
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
    *,
    check: Check | None = None,
) -> Rows:
    """The vectors (texts, D) of ``texts``, each its tokens, at least one."""
    sums = [_Pool(pooling, len(tokens), engine.hidden_size) for tokens in texts]
    if isinstance(engine, HiddenEngine):
        _share_passes(engine, texts, sums, check)
    else:
        for tokens, pool in zip(texts, sums, strict=True):
            with closing(engine.hidden_states(tokens, check)) as pieces:
                for rows in pieces:
                    pool.add(rows)
    if not sums:
        return np.empty((0, engine.hidden_size), np.float32)
    return np.stack([pool.result() for pool in sums])


def unit_length(vectors: Rows) -> Rows:
    """``vectors`` (n, D), each divided by its length."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    out: Rows = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return out


class _Pool:
    """One text's vector as its rows come."""

    def __init__(self, pooling: Pooling, tokens: int, size: int) -> None:
        self._mean = pooling == "mean"
        self._tokens = tokens
        self._sum = np.zeros(size, np.float64)

    def add(self, rows: Rows) -> None:
        """The next rows (n, D)."""
        if self._mean:
            self._sum += rows.sum(axis=0, dtype=np.float64)
        else:
            self._sum[:] = rows[-1]

    def result(self) -> Rows:
        """The vector (D,)."""
        return (self._sum / (self._tokens if self._mean else 1)).astype(np.float32)


def _share_passes(
    engine: HiddenEngine, texts: Sequence[Sequence[int]], pools: list[_Pool], check: Check | None
) -> None:
    weights, eps = engine.final_norm()
    waiting = deque(range(len(texts)))
    unfinished: tuple[int, KVCache] | None = None
    while waiting or unfinished is not None:
        room = engine.pass_rows
        parts: list[tuple[int, KVCache, Sequence[int]]] = []
        while room and (waiting or unfinished is not None):
            if unfinished is None:
                index = waiting.popleft()
                unfinished = index, engine.cache(len(texts[index]))
            index, cache = unfinished
            piece = texts[index][cache.length : cache.length + room]
            parts.append((index, cache, piece))
            room -= len(piece)
            if cache.length + len(piece) < len(texts[index]):
                break
            unfinished = None
        features = np.empty((sum(len(piece) for _, _, piece in parts), len(weights)), np.float32)
        batch = Batch.extend([(cache, piece) for _, cache, piece in parts])
        engine.run(batch, rows=[], check=check, features=features)
        scale = np.sqrt(np.square(features).mean(axis=1, keepdims=True) + eps)
        features = features / scale * weights
        at = 0
        for index, _, piece in parts:
            pools[index].add(features[at : at + len(piece)])
            at += len(piece)
