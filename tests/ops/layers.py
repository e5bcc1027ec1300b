"""Random layers that remember, in sizes that fit nothing, and passes over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

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
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights

HIDDEN = 48
SPECS = {
    "delta": RecurrentSpec(
        kind="delta", heads=6, key_heads=3, key_size=20, value_size=24, taps=4, eps=1e-6,
        norm_size=24,
    ),
    "delta-tiled": RecurrentSpec(
        kind="delta", heads=6, key_heads=3, key_size=7, value_size=40, taps=3, eps=1e-6,
        norm_size=40, tiled=True,
    ),
    "delta-channels": RecurrentSpec(
        kind="delta", heads=4, key_heads=4, key_size=16, value_size=16, taps=4, eps=1e-6,
        norm_size=16, channel_decay=True, gate="sigmoid",
    ),
    "delta-low-rank": RecurrentSpec(
        kind="delta", heads=3, key_heads=3, key_size=24, value_size=20, taps=3, eps=1e-6,
        norm_size=20, channel_decay=True, gate="sigmoid", low_rank=12,
    ),
    "delta-strong": RecurrentSpec(
        kind="delta", heads=4, key_heads=2, key_size=20, value_size=24, taps=4, eps=1e-6,
        norm_size=24, norm_eps=0.01, strength=2.0,
    ),
    "ssm": RecurrentSpec(
        kind="ssm", heads=6, key_heads=2, key_size=18, value_size=20, taps=4, eps=1e-6,
        norm_size=60, gate_first=True, conv_bias=True,
    ),
    "ssm-bounded": RecurrentSpec(
        kind="ssm", heads=6, key_heads=2, key_size=18, value_size=20, taps=4, eps=1e-6,
        time_steps=(0.1, 0.7),
    ),
    "conv": RecurrentSpec(
        kind="conv", heads=1, key_heads=1, key_size=1, value_size=1, taps=3, eps=1e-6, width=HIDDEN
    ),
}  # fmt: skip


class Layer:
    """One of ``SPECS``, or another, on an implementation. Rows go in and come out; caches hold its
    state.
    """

    def __init__(self, spec: str | RecurrentSpec, ops: Ops) -> None:
        self.spec, self.ops = SPECS[spec] if isinstance(spec, str) else spec, ops
        self.weights = _random_weights(self.spec, ops)

    def cache(self) -> KVCache:
        """An empty one."""
        return self.ops.kv_cache([self.spec], 1000)

    def run(self, *parts: tuple[Any, ...], cancelled: bool = False) -> Floats:
        """A pass over parts (cache, rows, mask if any), which counts unless it is ``cancelled``."""
        spans = tuple(Span(cache, len(x), *mask) for cache, x, *mask in parts)
        x = np.concatenate([x for _, x, *_ in parts])
        batch = Batch(np.zeros(len(x), np.int64), np.arange(len(x)), spans)
        rows = torch.from_numpy(x.copy()) if self.ops.name == "torch" else x.copy()
        with self.ops.scope():
            step = self.ops.begin(batch)
            out = self.ops.norm_recurrent(rows, self.weights, self.spec, step, 0)
        if not cancelled:
            for span in spans:
                span.cache.advance(span.rows)
        found = np.empty((len(x), HIDDEN), np.float32)
        copy_to_host(out, found)
        return found


def random_rows(count: int, seed: int = 0) -> Floats:
    """(count, HIDDEN)."""
    return np.random.default_rng(seed).standard_normal((count, HIDDEN), np.float32)


def tree_mask(parents: list[int]) -> npt.NDArray[np.bool_]:
    """What each row of a tree sees of it; -1 is the token before."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


class CachedLayer(Protocol):
    """A layer whose caches hold what it remembers of a sequence."""

    def cache(self) -> KVCache: ...

    def run(self, *parts: tuple[Any, ...]) -> Floats: ...


def check_tree(layer: CachedLayer, held: int, parents: list[int], first: int) -> None:
    """A tree behind ``held`` rows has each path's bits, in one pass and grown in two, and what is
    kept of it is as if read without the rest.
    """
    count = len(parents)
    mask = tree_mask([parent % (row + 1) - 1 for row, parent in enumerate(parents)])
    x, nodes = random_rows(held), random_rows(count, seed=5)

    def begun() -> KVCache:
        cache = layer.cache()
        if held:
            layer.run((cache, x))
        return cache

    cache, grown, first = begun(), begun(), min(first, count)
    out = layer.run((cache, nodes, mask))
    halves = [layer.run((grown, nodes[:first], mask[:first, :first]))]
    if first < count:
        halves.append(layer.run((grown, nodes[first:], mask[first:])))
    np.testing.assert_array_equal(np.concatenate(halves), out)
    for row in range(count):
        path = np.flatnonzero(mask[row])
        alone = begun()
        np.testing.assert_array_equal(layer.run((alone, nodes[path]))[-1], out[row])
    kept, after = np.flatnonzero(mask[-1]).tolist(), random_rows(9, seed=7)
    wanted = layer.run((alone, after))
    for each in (cache, grown):
        each.select(held, kept)
        assert each.length == held + len(kept)
        np.testing.assert_array_equal(layer.run((each, after)), wanted)


def check_sequences(layer: CachedLayer) -> None:
    """Sequences that share passes have the bits that each has alone."""
    x, y = random_rows(20), random_rows(20, seed=3)
    wanted = [layer.run((layer.cache(), rows)) for rows in (x, y)]
    one, two = layer.cache(), layer.cache()
    layer.run((one, x[:7]))
    both = layer.run((one, x[7:8]), (two, y[:9]))
    last = layer.run((two, y[9:10]), (one, x[8:]))
    np.testing.assert_array_equal(np.concatenate([both[:1], last[1:]]), wanted[0][7:])
    np.testing.assert_array_equal(np.concatenate([both[1:], last[:1]]), wanted[1][:10])


def check_cancelled(layer: Layer) -> None:
    """Passes that are cancelled, of a row and of more, leave no trace, nor does what is trimmed."""
    x, cache = random_rows(30), layer.cache()
    whole = layer.run((layer.cache(), x))
    for start, stop in ((0, 11), (11, 12), (12, 13)):
        layer.run((cache, x[start:stop]))
        for rows in (1, 9):
            layer.run((cache, random_rows(rows, seed=9)), cancelled=True)
    layer.run((cache, random_rows(2, seed=8)))
    assert cache.trim(13) == 13
    np.testing.assert_array_equal(layer.run((cache, x[13:])), whole[13:])


def _random_weights(spec: RecurrentSpec, ops: Ops) -> RecurrentWeights:
    draw = np.random.default_rng(1)

    def vector(size: int, scale: float, offset: float = 0.0) -> Any:
        return ops.vector((draw.standard_normal(size) * scale + offset).astype(np.float32))

    def matrix(rows: int, cols: int) -> Any:
        values = (draw.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        block = PackedTensor("w", F32, (rows, cols), values.view(np.uint8).reshape(rows, -1))
        return ops.weight((rows, cols), [block])

    stateful = spec.kind != "conv"
    norm_width = spec.value_size if spec.kind == "delta" else spec.inner
    rates = -np.exp(draw.standard_normal(spec.heads) / 2).astype(np.float32)
    return RecurrentWeights(
        norm=vector(HIDDEN, 0.1, 1.0),
        mix=matrix(spec.mix_rows, HIDDEN),
        taps=vector(spec.taps * spec.channels, 0.5),
        out=matrix(HIDDEN, spec.inner),
        taps_bias=vector(spec.channels, 0.1) if spec.conv_bias else None,
        decay=ops.vector(rates) if stateful else None,
        decay_bias=vector(spec.factors - spec.heads, 0.5) if stateful else None,
        skip=vector(spec.heads, 1.0) if spec.kind == "ssm" else None,
        out_norm=vector(norm_width, 0.1, 1.0) if spec.norm_size else None,
        gate_up=matrix(spec.inner, spec.low_rank) if spec.low_rank else None,
        decay_up=matrix(spec.factors - spec.heads, spec.low_rank) if spec.low_rank else None,
    )


EPS = 1e-6
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

    def __init__(self, shape: Shape, ops: Ops, tensors: dict[str, Floats] | None = None) -> None:
        self.spec, self.index, self.ops = shape.attention, shape.index, ops
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
