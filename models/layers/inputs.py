"""Per-layer embeddings of Gemma 4: every layer has inputs of its own.

A table has a few numbers per token and layer; a pass reads its tokens' rows and adds projected
embeddings. After its MLP, a layer gates its inputs by the residual stream. Knows names and shapes;
``quant/ops/streams.py`` computes.

Checkpoints present the table with one row per token and layer, without changing bytes, so a token's
rows are contiguous, in three or four tiles. A streamed model reads them from the SSD for each pass
and never loads the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from localrt.models.config import Block, DecoderConfig, Layer, Part, Places, Table
from localrt.models.layers.block import load_mixer
from localrt.models.layers.parts import PassState, Residual, joined
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import Array, Weight
from localrt.quant.ops.streams import InputGateSpec, InputGateWeights, InputProjection

LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
PROJECTION = "model.per_layer_model_projection"
PROJECTION_NORM = "model.per_layer_projection_norm"
GATE = "per_layer_input_gate"
OUT = "per_layer_projection"
POST_NORM = "post_per_layer_input_norm"
_HALF = math.sqrt(0.5)  # the sum of rows and projections keeps its variance


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Per-layer inputs: ``width`` numbers per layer for each of ``vocab_size`` tokens."""

    width: int
    vocab_size: int

    def table(self, layers: int) -> InputTable:
        """Checkpoints present it with a row for each layer of each token."""
        return InputTable(
            unit="inputs",
            tensor=LAYER_EMBEDDING,
            shape=(self.vocab_size * layers, self.width),
            scale=math.sqrt(self.width) * _HALF,
            layers=layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTable(Table):
    """The table: each token has a row for each of ``layers``, multiplied by ``scale``."""

    scale: float
    layers: int

    def part(self, weight: Weight) -> Part:
        return InputRows(weight, self.scale, self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class InputRows:
    """Looks up the tokens' rows in a table in memory."""

    table: Weight
    scale: float
    layers: int

    def __call__(self, state: PassState) -> None:
        """Set ``state.inputs`` to the table's rows of the batch's tokens."""
        state.inputs = state.ops.embed(self.table, state.step, self.scale, each=self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class ProjectInputs:
    """Adds projected embeddings to the inputs, before the first layer."""

    weights: InputProjection

    def __call__(self, state: PassState) -> None:
        """Bring ``state.inputs`` into the form that layers read."""
        assert state.inputs is not None, "their table comes first"
        state.inputs = state.ops.project_inputs(state.x, state.inputs, self.weights)


class InputGate:
    """``norm(out(activation(gate(x)) * inputs))``."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, width: int
    ) -> None:
        hidden = config.hidden_size
        prefix, activation = f"model.layers.{layer}.", config.mlp.activation
        assert activation == "silu" or activation == "gelu_tanh", "inputs pass a gate"
        self.spec = InputGateSpec(
            layer=layer, width=width, activation=activation, eps=config.norm_eps
        )
        self.weights = InputGateWeights(
            gate=weights.matrix((width, hidden), f"{prefix}{GATE}.weight"),
            out=weights.matrix((hidden, width), f"{prefix}{OUT}.weight"),
            post_norm=weights.vector(hidden, f"{prefix}{POST_NORM}.weight"),
        )

    def __call__(self, state: PassState) -> Array:
        assert state.inputs is not None, "they are made before the first layer"
        return state.ops.gate_inputs(state.x, state.inputs, self.weights, self.spec)

    def matrices(self) -> dict[str, Weight]:
        return {GATE: self.weights.gate, OUT: self.weights.out}


def _load_projection(config: DecoderConfig, weights: WeightLoader, width: int) -> ProjectInputs:
    """Load the part that runs before the first layer."""
    hidden = config.hidden_size
    # The published scale of 1 / sqrt(D) is omitted: the norm after it cancels it.
    return ProjectInputs(
        InputProjection(
            matrix=weights.matrix((config.layers * width, hidden), f"{PROJECTION}.weight"),
            norm=weights.vector(width, f"{PROJECTION_NORM}.weight", scale=_HALF),
            width=width,
            eps=config.norm_eps * hidden,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedInputs(Block):
    """Gemma 4's block: after its MLP a layer adds its ``inputs``, if the model has some, and
    multiplies the residual stream by a learned factor.
    """

    inputs: LayerInputs | None

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        own = self.inputs
        return () if own is None else (_load_projection(config, weights, own.width),)

    def attention(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, at: Places
    ) -> Part:
        ((spec, place),) = at
        return Residual(load_mixer(config, layer, weights, spec, place))

    def mlp(self, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer) -> Part:
        own: list[Layer] = [mlp]
        if self.inputs is not None:
            own.append(InputGate(config, layer, weights, self.inputs.width))
        *first, last = own
        total = weights.scalar(f"model.layers.{layer}.layer_scalar")
        return joined([*map(Residual, first), Residual(last, total=total)])

    def tables(self, config: DecoderConfig) -> Sequence[Table]:
        return () if self.inputs is None else (self.inputs.table(config.layers),)

    def numbers_beside(self, config: DecoderConfig) -> int:
        """Inputs raw, as rows and projected."""
        return 0 if self.inputs is None else 3 * config.layers * self.inputs.width
