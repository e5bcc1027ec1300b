"""Layers over several residual streams: Gemma 3n's AltUp, in the place of ``Residual``.

Attention's part predicts all streams and runs on the active one, with a learned residual of low
rank beside it; the MLP's part corrects all streams by what became of that one, and adds the layer's
own inputs to the others. ``quant/ops/streams.py`` says what is computed. Before the first layer the
streams are made of the embedding, behind the last they are joined.

Hyper-connections: layers that read a mixture of several residual streams, in the place of
``Residual``.

``quant/ops/streams.py`` says what is computed. Before the first layer each stream is the embedding;
behind the last, ``ReadStreams`` makes of them what the head sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localrt.models.config import DecoderConfig
from localrt.models.layers.inputs import InputGate
from localrt.models.layers.parts import Attention, Layer, PassState
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Weight
from localrt.quant.ops.streams import ConnectionWeights, LowRankWeights, StreamSpec, StreamWeights

SPLIT, JOIN = "model.altup_projections.{}.weight", "model.altup_unembed_projections.{}.weight"
_LEFT, _RIGHT = "laurel.linear_left.weight", "laurel.linear_right.weight"
_LOW_RANK_NORM = "laurel.post_laurel_norm.weight"
_SCALE = "altup.correct_output_scale"
_HALF = math.sqrt(0.5)  # attention and the low rank's residual both hold the stream


def load_projections(config: DecoderConfig, weights: WeightLoader, name: str) -> Weight:
    """The matrices of all streams but the first, ``name`` with their numbers."""
    assert config.streams is not None, "the model has several"
    others, hidden = config.streams.count - 1, config.hidden_size
    return weights.matrix((others * hidden, hidden), *(name.format(n) for n in range(others)))


@dataclass(frozen=True, slots=True, eq=False)
class SplitStreams:
    """The streams, of the embedding."""

    projections: Weight

    def __call__(self, state: PassState) -> None:
        """Fill ``state.streams``."""
        state.streams = state.ops.split_streams(state.x, self.projections)


@dataclass(frozen=True, slots=True, eq=False)
class JoinStreams:
    """What the head sees, of the streams."""

    projections: Weight

    def __call__(self, state: PassState) -> None:
        """Fill ``state.x``."""
        state.x = state.ops.join_streams(state.streams, self.projections)
        state.streams = None


class StreamAttention:
    """Predicts the streams, and adds attention and the low rank's residual to the active one."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, attention: Attention
    ) -> None:
        assert config.streams is not None, "the model has several"
        hidden, rank = config.hidden_size, config.low_rank
        prefix = f"model.layers.{layer}."
        self.layer, self.spec = attention, config.streams
        count = self.spec.count
        self.weights = _load_router(config, layer, weights, "prediction", count**3)
        self.low_rank = LowRankWeights(
            norm=attention.weights.norm,
            left=weights.matrix((rank, hidden), prefix + _LEFT),
            right=weights.matrix((hidden, rank), prefix + _RIGHT),
            post_norm=weights.vector(hidden, prefix + _LOW_RANK_NORM),
            eps=config.norm_eps,
        )

    def __call__(self, state: PassState) -> None:
        """``state.streams`` become predictions, ``state.x`` the active one with attention."""
        ops = state.ops
        state.streams, state.x = ops.predict_streams(state.streams, self.weights, self.spec)
        beside = ops.low_rank(state.x, self.low_rank)
        x = ops.add(state.x, self.layer(state))
        state.x = ops.add(x, beside, total=_HALF)


class StreamMlp:
    """Adds the MLP to the active stream, and corrects the others by it."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer
    ) -> None:
        assert config.streams is not None, "the model has several"
        self.layer, self.spec = mlp, config.streams
        count = self.spec.count
        self.weights = _load_router(config, layer, weights, "correction", count**2, scaled=True)
        self.gate = InputGate(config, layer, weights)

    def __call__(self, state: PassState) -> None:
        """``state.streams`` become those behind the layer."""
        ops = state.ops
        active = ops.add(state.x, self.layer(state))
        streams, state.x = ops.correct_streams(state.streams, active, self.weights, self.spec)
        state.streams = ops.add_to_streams(streams, self.gate.of(state, state.x))


def _load_router(
    config: DecoderConfig,
    layer: int,
    weights: WeightLoader,
    purpose: str,
    coefficients: int,
    *,
    scaled: bool = False,
) -> StreamWeights:
    """The router of predictions or of corrections: a unit each, so that each has its own copy."""
    spec: StreamSpec | None = config.streams
    assert spec is not None, "the model has several"
    hidden, prefix = config.hidden_size, f"model.layers.{layer}.altup."
    return StreamWeights(
        norm=weights.vector(hidden, f"{prefix}{purpose}_norm.weight", scale=1 / hidden),
        router=weights.matrix((spec.count, hidden), f"{prefix}{purpose}_router.weight"),
        coefficients=weights.vector(coefficients, f"{prefix}{purpose}_coefs.weight"),
        scale=weights.optional_vector(
            scaled and config.scaled_stream, hidden, f"model.layers.{layer}.{_SCALE}"
        ),
    )


_NORM = "hc_norm.weight"
_DOWN, _UP = "input_mix_weight_down.weight", "input_mix_weight_up.weight"
_SHARE = "block_inject_weight.weight"


@dataclass(frozen=True, slots=True, eq=False)
class RepeatStream:
    """The streams, of the embedding."""

    count: int

    def __call__(self, state: PassState) -> None:
        """Fill ``state.streams``."""
        state.streams = state.ops.repeat_stream(state.x, self.count)


@dataclass(frozen=True, slots=True, eq=False)
class Connected:
    """A layer that reads all streams, each of which takes its share of what the layer gives."""

    layer: Layer
    weights: ConnectionWeights

    def __call__(self, state: PassState) -> None:
        """``state.streams`` become those behind the layer."""
        state.x, shares = state.ops.read_streams(state.streams, self.weights)
        state.streams = state.ops.share_out(state.streams, self.layer(state), shares)

    def matrices(self) -> dict[str, Weight]:
        return self.layer.matrices()


@dataclass(frozen=True, slots=True, eq=False)
class ReadStreams:
    """What the head sees, of the streams."""

    weights: ConnectionWeights

    def __call__(self, state: PassState) -> None:
        """Fill ``state.x``."""
        state.x, _ = state.ops.read_streams(state.streams, self.weights)
        state.streams = None


def load_connection(
    weights: WeightLoader,
    prefix: str,
    *,
    hidden: int,
    count: int,
    rank: int,
    eps: float,
    norm_offset: float,
    shares: bool = True,
) -> ConnectionWeights:
    """The connection whose tensors' names begin with ``prefix``."""
    wide = count * hidden
    return ConnectionWeights(
        count=count,
        norm=weights.vector(wide, prefix + _NORM, offset=norm_offset),
        down=weights.matrix((rank, wide), prefix + _DOWN),
        up=weights.matrix((wide, rank), prefix + _UP),
        share=weights.matrix((count, wide), prefix + _SHARE) if shares else None,
        eps=eps,
    )
