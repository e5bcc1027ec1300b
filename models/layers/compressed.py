"""Attention to a window and to compressed tokens (DeepSeek-V4), on the host between products.

A token's one row of E numbers is key and value for all heads. A row sees the last tokens, and an
entry for each whole block: the mean of its values, weighted number by number by a softmax of their
gates and of a bias for each place, normed, and rotated at the block's first token. Where an indexer
chooses entries, they are made of two series: of the block before, and of the block. A head's sink
joins the softmax, and its result is rotated back. A token's row in the cache has all that later
ones need, and the entry of the block that it ends: all depends on earlier tokens alone.

An indexer alone (GLM-5, GLM-5.3-Flash) chooses what latent attention sees, as a tree's row sees its
ancestors. Its key of a block is such a mean of its tokens' keys. A score is the sum over heads of
the ReLU of the key's product with the head's query, times the head's factor. A row sees the best
blocks, or tokens, and those after its last whole block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from localrt.models.config import DecoderConfig
from localrt.models.layers.parts import PassState
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Array, Pass, Weight, to_host
from localrt.quant.ops.attention import CompressedSpec, LatentIndexSpec, LatentSpec, Rope
from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.ops.kv import TokenRows
from localrt.quant.ops.mathematics import exp
from localrt.quant.ops.protocol import Span, ranges


def normed(x: Floats, eps: float, weight: Floats | float = 1.0) -> Floats:
    """RMSNorm over the last axis."""
    scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))
    return np.asarray(x / scale * weight, np.float32)


def weighted_mean(values: Floats, gates: Floats) -> Floats:
    """The mean over the first axis, weighted number by number by a softmax of ``gates``."""
    powers = exp(gates - gates.max(0)).astype(np.float32)
    return np.asarray((powers / powers.sum(0) * values).sum(0), np.float32)


def turned(
    rope: Rope | None, x: Floats, positions: Any, *, first: int | None = None, back: bool = False
) -> Floats:
    """x (R, ..., E), the pairs at the end rotated, or those from ``first`` on; or ``back``."""
    assert rope is not None, "keys are rotated"
    shape = len(x), *[1] * (x.ndim - 2), -1
    cos, sin = (part.reshape(shape) for part in rope.turns(positions))
    sin, count, out = -sin if back else sin, 2 * cos.shape[-1], np.array(x, np.float32)
    pairs = out[..., (x.shape[-1] - count if first is None else first) :][..., :count]
    a, b = pairs[..., ::2].copy(), pairs[..., 1::2].copy()
    pairs[..., ::2], pairs[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return out


class CompressedAttention:
    """From the input to the output projection; ``at`` is the layer's number in the cache."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightLoader, at: int) -> None:
        spec, prefix = config.attention[layer], f"model.layers.{layer}.attn"
        assert isinstance(spec, CompressedSpec), "the layer's attention is of another kind"
        self.spec, self.layer, series = spec, at, spec.series
        self._sizes = [spec.query_rank, spec.size, *(2 * series * size for size in spec.entries)]
        stems = ("compressor.", "indexer.compressor.")[: len(spec.entries)]
        down = ["wq_a", "wkv", *(stem + part for stem in stems for part in ("wkv", "wgate"))]
        up, hidden, wide = ["wq_b"], config.hidden_size, spec.heads * spec.size
        if spec.index_heads:
            down, up = [*down, "indexer.weights_proj"], [*up, "indexer.wq_b"]
        asked = spec.index_heads * spec.entries[-1] if spec.index_heads else 0

        def matrix(rows: int, columns: int, *names: str) -> Weight:
            return weights.matrix((rows, columns), *(f"{prefix}.{name}.weight" for name in names))

        def vector(size: int, name: str) -> Floats:
            return weights.array((size,), prefix + name)

        rank, groups = spec.group_rank, range(spec.groups)
        self._down = matrix(sum(self._sizes) + spec.index_heads, hidden, *down)
        self._up = matrix(wide + asked, spec.query_rank, *up)
        self._groups = [matrix(rank, wide // spec.groups, f"wo_a.{group}") for group in groups]
        self._out = matrix(hidden, spec.groups * rank, "wo_b")
        self._norm = vector(hidden, "_norm.weight")
        self._query_norm = vector(spec.query_rank, ".q_norm.weight")
        self._key_norm = vector(spec.size, ".norm.weight")
        self._sinks = vector(spec.heads, ".attn_sink")
        sized = list(zip(stems, spec.entries, strict=True))
        self._biases = [vector(spec.block * series * size, f".{stem}ape") for stem, size in sized]
        self._norms = [vector(size, f".{stem}norm.weight") for stem, size in sized]

    def __call__(self, state: PassState) -> Array:
        spec, batch, ops = self.spec, state.batch, state.ops
        assert batch is not None, "it is not part of a captured graph"

        def times(x: Floats, weight: Weight) -> Floats:
            return to_host(ops.projected(ops.given_rows(x), weight))

        paths = [path for span in batch.spans for path in span.paths()]
        places = np.array([len(path) - 1 for path in paths])
        wide = times(normed(to_host(state.x), spec.eps, self._norm), self._down)
        low, key, *parts, scales = np.split(wide, np.cumsum(self._sizes), axis=1)
        up = times(normed(low, spec.eps, self._query_norm), self._up)
        queries, index = np.split(up, [spec.heads * spec.size], axis=1)
        queries = normed(queries.reshape(len(up), spec.heads, -1), spec.eps)
        seen, queries = np.empty_like(queries), turned(spec.rope, queries, places)
        if spec.index_heads:
            index = turned(spec.rope, index.reshape(len(up), spec.index_heads, -1), places)
        cached = [turned(spec.rope, normed(key, spec.eps, self._key_norm), places)]
        for part, size in zip(parts, spec.entries, strict=True):
            cached += [part[:, :size], part]  # room for an entry before it
        rows, own = np.concatenate(cached, axis=1), slice(0, spec.size)
        columns = spec.columns or [own]
        entry, asked = columns[0], columns[-1]
        for first, stop, span in ranges(batch.spans):
            cache = cast(Any, span.cache)
            kept = cache.token_rows(self.layer, spec.head_dim)
            kept.put(np.arange(span.rows) + cache.length, slice(None), rows[first:stop])
            for path in paths[first:stop]:
                if spec.block and len(path) % spec.block == 0:
                    self._put_entries(path, kept)
            for row, path in enumerate(paths[first:stop], first):
                ends = path[spec.block - 1 :: spec.block] if spec.block else path[:0]
                if spec.index_heads and len(ends) > spec.chosen:
                    ranks = np.maximum(index[row] @ kept.get(ends, asked).T, 0)
                    ranks = np.argsort(-(ranks * scales[row, :, None]).sum(0), kind="stable")
                    ends = ends[np.sort(ranks[: spec.chosen])]
                both = np.concatenate([kept.get(path[-spec.nearest :], own), kept.get(ends, entry)])
                scores = queries[row] @ both.T * np.float32(spec.scale)
                scores = np.hstack([scores, self._sinks[:, None]])
                powers = exp(scores - scores.max(1, keepdims=True))
                shares = (powers / powers.sum(1, keepdims=True))[:, :-1]
                seen[row] = shares.astype(np.float32) @ both
            cache.layer_done(self.layer, span.rows)
        seen = turned(spec.rope, seen, places, back=True).reshape(len(up), -1)
        groups = zip(np.split(seen, spec.groups, axis=1), self._groups, strict=True)
        joined = np.concatenate([times(part, weight) for part, weight in groups], axis=1)
        return cast(Array, ops.projected(ops.given_rows(joined), self._out))

    def _put_entries(self, path: Any, cache: TokenRows) -> None:
        """Write the entries of the block that ends ``path`` to its last token's row."""
        spec = self.spec
        for columns, bias, norm in zip(spec.columns, self._biases, self._norms, strict=True):
            size = columns.stop - columns.start
            behind = slice(columns.stop, columns.stop + 2 * spec.series * size)
            parts = cache.get(path[-spec.series * spec.block :], behind)
            parts = parts.reshape(-1, spec.block, 2, spec.series, size)
            parts[:, :, 1] += bias.reshape(spec.block, spec.series, size)
            # The block itself has the last series, the one before it that before
            own = np.concatenate([parts[n, :, :, n] for n in range(-len(parts), 0)])
            entry = normed(weighted_mean(own[:, 0], own[:, 1]), spec.eps, norm)
            at = np.array([len(path) - spec.block])
            cache.put(path[-1:], columns, turned(spec.rope, entry[None], at))

    def matrices(self) -> dict[str, Weight]:
        return {}  # they are rounded without calibration


class TokenIndex:
    """A layer's indexer, at place ``at`` in the cache; ``down`` is attention's first projection."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, down: Weight, at: int
    ) -> None:
        spec = cast(LatentSpec, config.attention[layer])
        self.spec, self.index, self.layer = spec, cast(LatentIndexSpec, spec.index), at
        index, prefix, rank = self.index, f"model.layers.{layer}.", cast(int, spec.query_rank)
        own, size, pooled = f"{prefix}self_attn.indexer.", index.size, index.head_dim > index.size
        names = [f"{own}{name}.weight" for name in ("wk", "weights_proj", *["gate"] * pooled)]
        mixed = (1 + pooled) * size + index.heads
        self._down, self._mix = down, weights.matrix((mixed, config.hidden_size), *names)
        self._up = weights.matrix((index.heads * size, rank), f"{own}wq_b.weight")
        self._key_norm = weights.array((size,), f"{own}k_norm.weight")
        self._key_bias = weights.array((size,), f"{own}k_norm.bias")
        self._norm = weights.array((config.hidden_size,), f"{prefix}input_layernorm.weight")
        self._query_norm = weights.array((rank,), f"{prefix}self_attn.q_a_layernorm.weight")
        self._bias = weights.array((index.block * size,), f"{own}ape") if pooled else None

    def __call__(self, state: PassState) -> Pass | None:
        """The pass, of which rows see what is chosen; None: they see everything."""
        index, spec, batch, ops = self.index, self.spec, state.batch, state.ops
        assert batch is not None, "it is not part of a captured graph"

        def times(x: Floats, weight: Weight) -> Floats:
            return to_host(ops.projected(ops.given_rows(x), weight))

        places = np.array([len(path) - 1 for span in batch.spans for path in span.paths()])
        x = normed(to_host(state.x), spec.eps, self._norm)
        low = normed(times(x, self._down)[:, : spec.query_rank], spec.latent_eps, self._query_norm)
        queries = times(low, self._up).reshape(len(x), index.heads, index.size)
        queries, end = turned(spec.rope, queries, places, first=0), index.size + index.heads
        keys, factors, gates = np.split(times(x, self._mix), [index.size, end], axis=1)
        keys = normed(keys - keys.mean(-1, keepdims=True), 1e-6, self._key_norm) + self._key_bias
        rows = np.zeros((len(x), index.head_dim), np.float32)  # with room for a block's key
        rows[:, : index.size] = turned(spec.rope, keys, places, first=0)
        rows[:, index.size : 2 * index.size] = gates
        sparse = (places.max() + 1) // index.block > index.most_blocks  # else all is chosen
        spans = list[Span]()
        for first, stop, span in ranges(batch.spans):
            cache = span.cache.kv if isinstance(span.cache, HybridCache) else span.cache
            kept: TokenRows = cast(Any, cache).token_rows(self.layer, index.head_dim)
            kept.put(np.arange(span.rows) + cache.length, slice(None), rows[first:stop])
            for path in span.paths():
                if self._bias is not None and len(path) % index.block == 0:
                    both = kept.get(path[-index.block :], slice(0, 2 * index.size))
                    means, gates = np.split(both, 2, axis=1)
                    key = weighted_mean(means, gates + self._bias.reshape(gates.shape))
                    kept.put(path[-1:], slice(2 * index.size, None), key[None])
            if sparse:
                mask = np.zeros((span.rows, cache.length + span.rows), np.bool_)
                for row, path in enumerate(span.paths()):
                    chosen = self._best(queries[first + row], factors[first + row], path, kept)
                    mask[row, chosen] = True
                spans.append(replace(span, mask=mask, ahead=None))
            cast(Any, cache).layer_done(self.layer, span.rows)
        return ops.begin(replace(batch, spans=tuple(spans))) if sparse else None

    def _best(self, queries: Floats, factors: Floats, path: Any, cache: TokenRows) -> Any:
        """Of ``path`` what a row sees."""
        block, most, last = self.index.block, self.index.most_blocks, self.index.head_dim
        whole = len(path) // block
        if whole <= most:
            return path
        keys = cache.get(path[block - 1 :: block], slice(last - self.index.size, last))
        scores = (np.maximum(queries @ keys.T, 0) * factors[:, None]).sum(0)
        best = np.argsort(-scores, kind="stable")[:most]
        blocks = path[: whole * block].reshape(whole, block)[best]
        return np.concatenate([blocks.reshape(-1), path[whole * block :]])
