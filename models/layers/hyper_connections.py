"""Hyper-connections: a block over several residual streams; layers read a mixture of them.

``quant/ops/streams.py`` computes this. Before the first layer each stream is the embedding; after
the last, the head's input is made from them. Attention sees the tokens that an indexer chooses, and
before one layer hashed n-gram embeddings are added (Qwen3.8-Flash-Next).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from localrt.models.config import Block, DecoderConfig, Layer, Part, Places, Table
from localrt.models.layers.attention import IndexedAttention
from localrt.models.layers.block import load_mixer
from localrt.models.layers.compressed import normed
from localrt.models.layers.ngrams import AddNgrams, NgramLayer
from localrt.models.layers.parts import Attention, PassState, joined
from localrt.models.weights import WeightLoader
from localrt.quant.formats.tiled import TILE_ROWS
from localrt.quant.ops.arrays import Array, Weight, to_host
from localrt.quant.ops.attention import AttentionSpec, IndexSpec
from localrt.quant.ops.mathematics import exp
from localrt.quant.ops.protocol import LayerSpec, StreamOps
from localrt.quant.ops.streams import ConnectionWeights

_ATTENTION, _MLP = "attn_hyper_connection.", "mlp_hyper_connection."
_MIXER = "model.hyper_connection_mixer."
_NORM = "hc_norm.weight"
_DOWN, _UP = "input_mix_weight_down.weight", "input_mix_weight_up.weight"
_SHARE = "block_inject_weight.weight"


@dataclass(frozen=True, slots=True, eq=False)
class RepeatStream:
    """Makes the streams from the embedding."""

    count: int

    def __call__(self, state: PassState) -> None:
        """Fill ``state.streams``."""
        state.streams = cast(StreamOps, state.ops).repeat_stream(state.x, self.count)


@dataclass(frozen=True, slots=True, eq=False)
class Connected:
    """A layer that reads a mixture of all streams and adds its output to each; None: the head."""

    layer: Layer | None
    weights: ConnectionWeights

    def __call__(self, state: PassState) -> None:
        """Replace ``state.streams`` by the layer's output, or fill ``state.x``."""
        assert state.streams is not None, "they are made before the first layer"
        streams, state.streams = state.streams, None
        ops = cast(StreamOps, state.ops)
        state.x, shares = ops.read_streams(streams, self.weights)
        if self.layer is not None:
            assert shares is not None, "only the last connection has none"
            state.streams = ops.share_out(streams, self.layer(state), shares)

    def matrices(self) -> dict[str, Weight]:
        return {} if self.layer is None else self.layer.matrices()


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections(Block):
    """A block of ``count`` residual streams; layers read a mixture, whose gates have low-rank
    projections of ``rank``. Each reader has its own norms.

    ``index`` chooses the tokens that layers attend to; ``index_apart``: separate matrices project
    its queries and key. One layer may have ``ngrams``.
    """

    final_norm = False

    count: int
    rank: int = 0
    ngrams: NgramLayer | None = None
    index: IndexSpec | None = None
    index_apart: bool = False

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"hc_count must be at least 2, is {self.count}")

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        return (RepeatStream(self.count),)

    def attention(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, at: Places
    ) -> Part:
        parts, places = list[Part](), list(at)
        if self.ngrams is not None and self.ngrams.layer == layer:
            _, place = places.pop()
            parts.append(AddNgrams(config, self.ngrams, weights, place, self.count))
        (spec, place), *attending = places
        if attending and self.index is not None:
            assert isinstance(spec, IndexSpec), "it comes before what it chooses for"
            mixer: Layer = IndexedAttention(
                Attention(config, layer, weights, attending[0][1]),
                config,
                layer,
                weights,
                spec,
                place,
                apart=self.index_apart,
            )
        else:
            mixer = load_mixer(config, layer, weights, *places[-1])
        parts.append(self._connected(config, layer, weights, mixer, _ATTENTION))
        return joined(parts)

    def mlp(self, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer) -> Part:
        return self._connected(config, layer, weights, mlp, _MLP)

    def after(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        return (Connected(None, self._connection(config, weights, _MIXER, shares=False)),)

    def memory(self, config: DecoderConfig, layer: int) -> tuple[LayerSpec, ...]:
        """A layer's memory: the indexer before its attention, n-grams last."""
        own, ngrams = config.attention[layer], self.ngrams
        whole = (
            self.index if isinstance(own, AttentionSpec) else None,
            own,
            ngrams.memory if ngrams is not None and ngrams.layer == layer else None,
        )
        return tuple(spec for spec in whole if spec is not None)

    def tables(self, config: DecoderConfig) -> Sequence[Table]:
        own = self.ngrams
        return () if own is None else (own.table(config.cache_places[own.layer][-1]),)

    def numbers_beside(self, config: DecoderConfig) -> int:
        """Streams before and after a layer, normed, and gates; n-gram rows and the tiles read for
        them; tokens that an indexer chooses.
        """
        streams = self.count * config.hidden_size
        ngrams = 0 if self.ngrams is None else self.ngrams.width * (1 + TILE_ROWS // 2)
        index = self.index
        chosen = 0 if index is None else 1 + index.most_tokens + index.projected_rows
        return 4 * streams + ngrams + chosen

    def _connected(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, own: Layer, name: str
    ) -> Part:
        return Connected(own, self._connection(config, weights, f"model.layers.{layer}.{name}"))

    def _connection(
        self, config: DecoderConfig, weights: WeightLoader, prefix: str, *, shares: bool = True
    ) -> ConnectionWeights:
        wide, rank = self.count * config.hidden_size, self.rank
        return ConnectionWeights(
            count=self.count,
            norm=weights.vector(wide, prefix + _NORM, offset=config.norm_offset),
            down=weights.matrix((rank, wide), prefix + _DOWN),
            up=weights.matrix((wide, rank), prefix + _UP),
            share=weights.matrix((self.count, wide), prefix + _SHARE) if shares else None,
            eps=config.norm_eps,
        )


class Mixed:
    """As ``Connected``; a matrix with rows and columns of sum 1 mixes the streams (mHC, 2026)."""

    def __init__(
        self, config: DecoderConfig, weights: WeightLoader, prefix: str, layer: Layer | None
    ) -> None:
        self.block, self.layer, self.eps = cast(MixedStreams, config.block), layer, config.norm_eps
        count = self.block.count
        self._sizes = [count] if layer is None else [count, count, count * count]
        rows, self._mean = sum(self._sizes), layer is None and self.block.mean
        if self._mean:
            return
        self._matrix = weights.array((rows * count * config.hidden_size,), f"{prefix}fn")
        self._base = weights.array((rows,), f"{prefix}base")
        self._scale = weights.array((len(self._sizes),), f"{prefix}scale")

    def __call__(self, state: PassState) -> None:
        """Replace ``state.streams`` by the layer's output, or fill ``state.x``."""
        count, eps, flat = self.block.count, np.float32(self.block.eps), to_host(state.streams)
        streams = flat.reshape(len(flat), count, -1)
        if self._mean:
            state.x = state.ops.given_rows(streams.mean(1))
            return
        matrix = self._matrix.reshape(len(self._base), -1)
        numbers = np.stack([matrix @ row for row in normed(flat, self.eps)])
        numbers = numbers * np.repeat(self._scale, self._sizes) + self._base
        shares = (1 / (1 + exp(-numbers[:, : 2 * count, None]))).astype(np.float32)
        state.x = state.ops.given_rows(((shares[:, :count] + eps) * streams).sum(1))
        if self.layer is None:
            return
        mix = numbers[:, 2 * count :].reshape(-1, count, count)
        mix = exp(mix - mix.max(-1, keepdims=True)).astype(np.float32)
        mix = mix / mix.sum(-1, keepdims=True) + eps
        for axis in [-2, *[-1, -2] * (self.block.rounds - 1)]:  # Sinkhorn and Knopp, 1967
            mix = mix / (mix.sum(axis, keepdims=True) + eps)
        out = 2 * shares[:, count:] * to_host(self.layer(state))[:, None]
        out += mix.swapaxes(1, 2) @ streams
        state.streams = cast(Array, state.ops.given_rows(out.reshape(flat.shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStreams(HyperConnections):
    """A block that mixes its streams by matrices (DeepSeek-V4), balanced in ``rounds``; ``eps`` is
    added to sums. The head reads the ``mean`` of the streams, or a mixture of them.
    """

    final_norm = True

    eps: float
    rounds: int
    mean: bool = False

    def after(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        return (Mixed(config, weights, "hc_head_", None),)

    def _connected(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, own: Layer, name: str
    ) -> Part:
        site = "attn" if name == _ATTENTION else "ffn"
        return Mixed(config, weights, f"model.layers.{layer}.hc_{site}_", own)
