"""Random layers of attention to chosen tokens, in sizes that fit nothing, and passes over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from localrt.quant.formats import F32, PackedTensor
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import copy_to_host
from localrt.quant.ops.attention import (
    AttentionSpec,
    AttentionWeights,
    IndexSpec,
    IndexWeights,
    Rope,
)
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Ops, Span

HIDDEN, EPS = 48, 1e-6
ROPE = Rope(inv_freq=tuple(10000.0 ** (-i / 4) for i in range(4)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of attention with heads of 16 numbers, and of its indexer."""

    heads: int
    kv_heads: int
    index_heads: int
    index_dim: int
    block: int
    budget: int

    @property
    def attention(self) -> AttentionSpec:
        """Gated, as in Qwen's models."""
        return AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=16,
            scale=0.25,
            eps=EPS,
            rope=ROPE,
            gated=True,
        )

    @property
    def index(self) -> IndexSpec:
        """What chooses."""
        return IndexSpec(
            heads=self.index_heads,
            kv_heads=1,
            head_dim=self.index_dim,
            scale=1.0,
            eps=EPS,
            rope=ROPE,
            block=self.block,
            budget=self.budget,
        )


SHAPES = {
    "by-4": Shape(heads=6, kv_heads=2, index_heads=3, index_dim=48, block=4, budget=12),
    "by-3": Shape(heads=6, kv_heads=2, index_heads=5, index_dim=32, block=3, budget=12),
    "single": Shape(heads=4, kv_heads=4, index_heads=4, index_dim=16, block=1, budget=5),
    "wide": Shape(heads=34, kv_heads=1, index_heads=9, index_dim=16, block=20, budget=40),
    "long": Shape(heads=6, kv_heads=2, index_heads=4, index_dim=16, block=3, budget=300),
}


def random_tensors(shape: Shape) -> dict[str, Floats]:
    """The layer's tensors; norms are published minus 1."""
    draw = np.random.default_rng(7)
    spec, index = shape.attention, shape.index

    def matrix(rows: int, cols: int) -> Floats:
        return (draw.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    def norm(size: int) -> Floats:
        return (draw.standard_normal(size) * 0.1).astype(np.float32)

    kv_rows = spec.kv_heads * spec.head_dim
    return {
        "q_proj": matrix(2 * spec.heads * spec.head_dim, HIDDEN),
        "k_proj": matrix(kv_rows, HIDDEN),
        "v_proj": matrix(kv_rows, HIDDEN),
        "o_proj": matrix(HIDDEN, spec.heads * spec.head_dim),
        "q_norm": norm(spec.head_dim),
        "k_norm": norm(spec.head_dim),
        "indexer.index_qk_proj": matrix(index.projected_rows, HIDDEN),
        "indexer.q_layernorm": norm(index.head_dim),
        "indexer.k_layernorm": norm(index.head_dim),
    }


class IndexedLayer:
    """One of ``SHAPES`` on an implementation. Rows go in and come out; caches hold two layers."""

    def __init__(
        self,
        shape: Shape,
        ops: Ops,
        tensors: dict[str, Floats] | None = None,
        *,
        sees_all: bool = False,
    ) -> None:
        self.spec, self.index, self.ops, self.sees_all = shape.attention, shape.index, ops, sees_all
        tensors = random_tensors(shape) if tensors is None else tensors

        def matrix(*names: str) -> Any:
            blocks = [
                PackedTensor(name, F32, tensors[name].shape, tensors[name].view(np.uint8))
                for name in names
            ]
            return ops.weight((sum(b.shape[0] for b in blocks), blocks[0].shape[1]), blocks)

        def norm(name: str) -> Any:
            return ops.vector(1 + tensors[name])

        self.weights = AttentionWeights(
            norm=None,
            qkv=matrix("q_proj", "k_proj", "v_proj"),
            out=matrix("o_proj"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
        )
        self.index_weights = IndexWeights(
            qk=matrix("indexer.index_qk_proj"),
            q_norm=norm("indexer.q_layernorm"),
            k_norm=norm("indexer.k_layernorm"),
        )
        self.chosen: Any = None

    def cache(self) -> KVCache:
        """An empty one."""
        return self.ops.kv_cache([self.spec, self.index], 1000)

    def run(self, *parts: tuple[Any, ...]) -> Floats:
        """A pass over parts (cache, rows, mask if any); ``chosen`` is what it has chosen."""
        spans = tuple(Span(cache, len(x), *mask) for cache, x, *mask in parts)
        x = np.concatenate([x for _, x, *_ in parts])
        places = np.concatenate([_places(span) for span in spans])
        batch = Batch(np.zeros(len(x), np.int64), places, spans)
        rows = torch.from_numpy(x.copy()) if self.ops.name == "torch" else x.copy()
        with self.ops.scope():
            step = self.ops.begin(batch)
            self.chosen = self.ops.choose_tokens(rows, self.index_weights, self.index, step, 1)
            q = self.ops.norm_qkv_rope_append(rows, self.weights, self.spec, step, 0)
            if self.sees_all:
                out = self.ops.attention_output(q, self.weights, self.spec, step, 0)
            else:
                out = self.ops.chosen_output(q, self.weights, self.spec, step, 0, self.chosen)
        for span in spans:
            span.cache.advance(span.rows)
        found = np.empty((len(x), HIDDEN), np.float32)
        copy_to_host(out, found)
        return found

    def picks(self) -> list[list[int]]:
        """Where the tokens lie that each row of the last pass saw, in a pass of one sequence."""
        if self.ops.name == "torch":
            return [torch.nonzero(row).flatten().tolist() for row in self.chosen[0]]
        return [row[1 : 1 + row[0]].tolist() for row in self.chosen]


def _places(span: Span) -> npt.NDArray[np.int64]:
    """Positions of a span's rows: of a tree's, behind their ancestors."""
    held = span.cache.length
    if span.mask is None:
        return held + np.arange(span.rows)
    base = held + span.rows - span.mask.shape[1]
    return base + span.mask.sum(1).astype(np.int64) - 1
