"""Gemma 3n's block over several residual streams (AltUp), with per-layer inputs.

The attention part predicts all streams and runs on the active one, in parallel with a learned
low-rank residual. The MLP part corrects all streams by the active one's result, and adds the
per-layer inputs to the others. ``quant/ops/streams.py`` computes this. The streams are made from
the embedding before the first layer, and joined after the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localrt.models.config import Block, DecoderConfig, Layer, Part, Places, Table
from localrt.models.layers.inputs import InputGate, LayerInputs, load_input_projection
from localrt.models.layers.parts import Attention, PassState
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import Weight
from localrt.quant.ops.streams import LowRankWeights, StreamSpec, StreamWeights

_SPLIT, _JOIN = "model.altup_projections.{}.weight", "model.altup_unembed_projections.{}.weight"
_LEFT, _RIGHT = "laurel.linear_left.weight", "laurel.linear_right.weight"
_LOW_RANK_NORM = "laurel.post_laurel_norm.weight"
_SCALE = "altup.correct_output_scale"
_HALF = math.sqrt(0.5)  # attention and the low-rank residual both include the stream


@dataclass(frozen=True, slots=True, eq=False)
class SplitStreams:
    """Makes the streams from the embedding."""

    projections: Weight

    def __call__(self, state: PassState) -> None:
        """Fill ``state.streams``."""
        state.streams = state.ops.split_streams(state.x, self.projections)


@dataclass(frozen=True, slots=True, eq=False)
class JoinStreams:
    """Makes the head's input from the streams."""

    projections: Weight

    def __call__(self, state: PassState) -> None:
        """Fill ``state.x``."""
        assert state.streams is not None, "they are made before the first layer"
        state.x = state.ops.join_streams(state.streams, self.projections)
        state.streams = None


class StreamAttention:
    """Predicts the streams, and adds attention and the low-rank residual to the active one."""

    def __init__(
        self,
        block: AltUp,
        config: DecoderConfig,
        layer: int,
        weights: WeightLoader,
        attention: Attention,
    ) -> None:
        hidden, rank = config.hidden_size, block.low_rank
        prefix = f"model.layers.{layer}."
        self.layer, self.spec = attention, block.streams
        self.weights = _load_router(block, config, layer, weights, "prediction")
        self.low_rank = LowRankWeights(
            norm=attention.weights.norm,
            left=weights.matrix((rank, hidden), prefix + _LEFT),
            right=weights.matrix((hidden, rank), prefix + _RIGHT),
            post_norm=weights.vector(hidden, prefix + _LOW_RANK_NORM),
            eps=config.norm_eps,
        )

    def __call__(self, state: PassState) -> None:
        """Set ``state.streams`` to predictions, ``state.x`` to the active one plus attention."""
        ops = state.ops
        assert state.streams is not None, "they are made before the first layer"
        state.streams, state.x = ops.predict_streams(state.streams, self.weights, self.spec)
        beside = ops.low_rank(state.x, self.low_rank)
        x = ops.add(state.x, self.layer(state))
        state.x = ops.add(x, beside, total=_HALF)


class StreamMlp:
    """Adds the MLP to the active stream, and corrects the others by it."""

    def __init__(
        self, block: AltUp, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer
    ) -> None:
        self.layer, self.spec = mlp, block.streams
        self.weights = _load_router(block, config, layer, weights, "correction")
        self.gate = InputGate(config, layer, weights, block.inputs.width)

    def __call__(self, state: PassState) -> None:
        """Replace ``state.streams`` by the layer's output."""
        ops = state.ops
        active = ops.add(state.x, self.layer(state))
        assert state.streams is not None, "they are made before the first layer"
        streams, state.x = ops.correct_streams(state.streams, active, self.weights, self.spec)
        state.streams = ops.add_to_streams(streams, self.gate.of(state, state.x))


def _load_router(
    block: AltUp,
    config: DecoderConfig,
    layer: int,
    weights: WeightLoader,
    purpose: Literal["prediction", "correction"],
) -> StreamWeights:
    """Load the router for predictions or corrections: two units, so each has a copy."""
    hidden, prefix = config.hidden_size, f"model.layers.{layer}.altup."
    count, corrects = block.streams.count, purpose == "correction"
    coefficients = count**2 if corrects else count**3
    return StreamWeights(
        norm=weights.vector(hidden, f"{prefix}{purpose}_norm.weight", scale=1 / hidden),
        router=weights.matrix((count, hidden), f"{prefix}{purpose}_router.weight"),
        coefficients=weights.vector(coefficients, f"{prefix}{purpose}_coefs.weight"),
        scale=weights.optional_vector(
            corrects and block.scaled, hidden, f"model.layers.{layer}.{_SCALE}"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp(Block):
    """Gemma 3n's block. ``scaled``: the active stream is scaled before it gates a layer's
    ``inputs``; ``low_rank`` is the rank of the residual parallel to attention.
    """

    streams: StreamSpec
    inputs: LayerInputs
    scaled: bool
    low_rank: int

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        projection = load_input_projection(config, weights, self.inputs.width)
        return projection, SplitStreams(self._projections(config, weights, _SPLIT))

    def attention(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, at: Places
    ) -> Part:
        ((_, place),) = at
        attention = Attention(config, layer, weights, place)
        return StreamAttention(self, config, layer, weights, attention)

    def mlp(self, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer) -> Part:
        return StreamMlp(self, config, layer, weights, mlp)

    def after(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        return (JoinStreams(self._projections(config, weights, _JOIN)),)

    def tables(self, config: DecoderConfig) -> Sequence[Table]:
        return (self.inputs.table(config.layers),)

    def numbers_beside(self, config: DecoderConfig) -> int:
        """Inputs raw, as rows and projected; streams before and after a layer."""
        inputs = config.layers * self.inputs.width
        return 3 * inputs + 2 * self.streams.count * config.hidden_size

    def _projections(self, config: DecoderConfig, weights: WeightLoader, name: str) -> Weight:
        """Load the matrices of all streams but the first; ``name`` gets the stream's number."""
        others, hidden = self.streams.count - 1, config.hidden_size
        return weights.matrix((others * hidden, hidden), *(name.format(n) for n in range(others)))
