"""Per-layer embeddings, Gemma 3n's and Gemma 4's: inputs that every layer has of its own.

A table holds a few numbers of each token for every layer; a pass takes a token's rows of it, and
adds what the embeddings are projected to. Behind its MLP a layer gates its part of them by the
residual stream. It knows names and shapes; ``quant/ops/streams.py`` says what is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localrt.models.config import DecoderConfig
from localrt.models.layers.parts import PassState
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Array, Weight
from localrt.quant.ops.streams import InputGateSpec, InputGateWeights, InputProjection

_PROJECTION = "model.per_layer_model_projection.weight"
_PROJECTION_NORM = "model.per_layer_projection_norm.weight"
_GATE = "per_layer_input_gate"
_OUT = "per_layer_projection"
_POST_NORM = "post_per_layer_input_norm"
_HALF = math.sqrt(0.5)  # rows and projections are added to one variance


def input_scale(config: DecoderConfig) -> float:
    """What the table's rows are times."""
    assert config.layer_inputs is not None, "the model has such a table"
    return math.sqrt(config.layer_inputs.width) * _HALF


@dataclass(frozen=True, slots=True, eq=False)
class InputRows:
    """The tokens' rows of a table that is in memory."""

    table: Weight
    scale: float
    layers: int

    def __call__(self, state: PassState) -> None:
        """``state.inputs`` as the table has them, for the batch's tokens."""
        state.inputs = state.ops.embed(self.table, state.step, self.scale, each=self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class ProjectInputs:
    """The embeddings' part of the inputs, before the first layer."""

    weights: InputProjection

    def __call__(self, state: PassState) -> None:
        """``state.inputs`` as layers take them."""
        state.inputs = state.ops.project_inputs(state.x, state.inputs, self.weights)


class InputGate:
    """``norm(out(activation(gate(x)) * inputs))``."""

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightLoader) -> None:
        assert config.layer_inputs is not None, "the model's layers have inputs"
        hidden, width = config.hidden_size, config.layer_inputs.width
        prefix, activation = f"model.layers.{layer}.", config.mlp.activation
        assert activation != "relu2", "what lets inputs through is a gate"
        self.spec = InputGateSpec(
            layer=layer, width=width, activation=activation, eps=config.norm_eps
        )
        self.weights = InputGateWeights(
            gate=weights.matrix((width, hidden), f"{prefix}{_GATE}.weight"),
            out=weights.matrix((hidden, width), f"{prefix}{_OUT}.weight"),
            post_norm=weights.vector(hidden, f"{prefix}{_POST_NORM}.weight"),
        )

    def __call__(self, state: PassState) -> Array:
        return self.of(state, state.x)

    def of(self, state: PassState, x: Array) -> Array:
        """The same, gated by ``x`` (R, D)."""
        return state.ops.gate_inputs(x, state.inputs, self.weights, self.spec)

    def matrices(self) -> dict[str, Weight]:
        return {_GATE: self.weights.gate, _OUT: self.weights.out}


def load_input_projection(config: DecoderConfig, weights: WeightLoader) -> ProjectInputs:
    """What is computed before the first layer."""
    assert config.layer_inputs is not None, "the model's layers have inputs"
    hidden, width = config.hidden_size, config.layer_inputs.width
    # The projection is published with a scale of 1 / sqrt(D), which its norm takes out again.
    return ProjectInputs(
        InputProjection(
            matrix=weights.matrix((config.layers * width, hidden), _PROJECTION),
            norm=weights.vector(width, _PROJECTION_NORM, scale=_HALF),
            width=width,
            eps=config.norm_eps * hidden,
        )
    )
