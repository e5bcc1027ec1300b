"""A mixture of experts as a block's MLP: norm, router, chosen experts, shared experts.

Each expert's weights are a unit. An ``Experts`` computes the chosen ones: ``ResidentExperts`` if
all are in memory, otherwise one that loads them during the pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError
from localrt.models.config import (
    CHOICE_BIAS,
    EXPERT_SCALE,
    LATENT_DOWN,
    LATENT_UP,
    ROUTER,
    ROUTER_NORM,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_GATE_UP,
    DecoderConfig,
    expert_matrices,
)
from localrt.models.layers.parts import GatedMlp, PassState, norm_of_layer
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import Array, Weight
from localrt.quant.ops.experts import ExpertSpec, ExpertTable, ExpertWeights, RouterWeights, Routing
from localrt.quant.ops.protocol import MlpWeights, Ops

_EXPERT_NORM = "pre_feedforward_layernorm_2"
_DENSE_POST_NORM = "post_feedforward_layernorm_1"
_EXPERT_POST_NORM = "post_feedforward_layernorm_2"


@dataclass(frozen=True, slots=True)
class Routed:
    """A sparse layer's routed rows; ``rows`` are the experts' inputs.

    ``place`` is the layer's number among the sparse ones, ``spec`` what each expert computes.
    """

    layer: int
    place: int
    spec: ExpertSpec
    normed: Array  # (R, D)
    rows: Array
    routing: Routing

    def read(self, routing: Routing | None = None) -> None:
        """Copy the router's choice to the host, waiting for it.

        With ``routing`` it is there already.

        Raises:
            CheckpointError: the router gives NaN.
        """
        routing = routing or self.routing
        if not np.isfinite(routing.weights.sum()):
            raise CheckpointError(
                f"model.layers.{self.layer}.mlp: the router's scores are not numbers: the weights "
                "are damaged, or the layers before it overflow; download or quantize the model "
                "again"
            )


class SparseMlp:
    """Norm, router and shared experts of a layer; ``experts`` computes the chosen ones.

    ``place`` is the layer's number among the sparse ones.
    """

    def __init__(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, experts: Experts
    ) -> None:
        spec, hidden = config.mixture(layer), config.hidden_size
        assert spec is not None, "a dense layer has no experts"
        self.spec = spec
        self.experts = experts
        self.layer = layer
        self.place = config.sparse_layers[layer]
        self._mlp = config.mlp_of(layer)
        prefix = f"model.layers.{layer}."
        count, optional = spec.router.count, weights.optional_vector
        self._beside = _BesideDense(config, layer, weights) if spec.beside_dense else None
        names, norm = config.names_of(layer), partial(norm_of_layer, config, layer, weights)
        self._post_norm = norm("" if spec.beside_dense else names.mlp_post_norm)
        self.router = RouterWeights(
            norm=norm(_EXPERT_NORM if spec.beside_dense else names.mlp_norm),
            gate=weights.matrix((count, hidden), f"{prefix}{ROUTER}.weight"),
            gate_bias=optional(spec.gate_bias, count, f"{prefix}{ROUTER}.bias"),
            choice_bias=optional(spec.choice_bias, count, prefix + CHOICE_BIAS),
            gate_norm=weights.vector(hidden, prefix + ROUTER_NORM, scale=1 / math.sqrt(hidden))
            if spec.beside_dense
            else None,
            expert_scale=optional(spec.beside_dense, count, prefix + EXPERT_SCALE),
        )
        self._table, self._scored = None, spec.router
        if spec.hashed:
            self._scored, rows = replace(spec.router, used=count), config.vocab_size
            table = weights.array((rows * spec.router.used,), f"{prefix}{ROUTER}.tid2eid")
            self._table = _experts_of_tokens(table, rows, count, f"{prefix}{ROUTER}.tid2eid")
        self.shared: MlpWeights | None = None
        self.shared_gate = None
        if spec.shared:
            gated = config.mlp.gated
            gate_up = [f"{prefix}{name}.weight" for name in SHARED_GATE_UP[0 if gated else 1 :]]
            down = f"{prefix}{SHARED_DOWN}.weight"
            self.shared = MlpWeights(
                norm=None,
                gate_up=weights.matrix((len(gate_up) * spec.shared, hidden), *gate_up),
                down=weights.matrix((hidden, spec.shared), down),
            )
        self._latent_down = self._latent_up = None
        if size := spec.latent:
            self._latent_down = weights.matrix((size, hidden), f"{prefix}{LATENT_DOWN}.weight")
            self._latent_up = weights.matrix((hidden, size), f"{prefix}{LATENT_UP}.weight")
        if spec.shared_gate:
            self.shared_gate = weights.matrix((1, hidden), f"{prefix}{SHARED_GATE}.weight")

    def __call__(self, state: PassState) -> Array:
        ops, routed = state.ops, self._route(state)
        layer_pass = self.experts.begin(routed, state)
        try:
            shared = self._shared_rows(ops, routed)
            slots = layer_pass.slots()
        finally:
            layer_pass.end()
        rows = self._combine(ops, slots, routed.routing, shared)
        if self._post_norm is not None:
            return ops.norm_sum(rows, None, self._post_norm, self._mlp.result_eps)
        return rows if self._beside is None else self._beside.join(state, rows)

    def _route(self, state: PassState) -> Routed:
        """Return the normed rows and their experts, which may not be on the host yet.

        Raises:
            CheckpointError: the router gives NaN (noticed only if the host has the choice).
        """
        ops, down = state.ops, self._latent_down
        normed, routing = ops.norm_route(state.x, self.router, self._scored)
        if self._table is not None:
            assert state.batch is not None, "it is not part of a captured graph"
            routing = self.spec.router.choose(routing, self._table[state.batch.tokens])
        rows = normed if down is None else ops.latent_rows(normed, down)
        if self.spec.weigh_inputs:
            rows = ops.weigh_rows(rows, routing)
        routed = Routed(self.layer, self.place, self.spec.expert, normed, rows, routing)
        if not routing.away:
            routed.read()
        return routed

    def _shared_rows(self, ops: Ops, routed: Routed) -> Array | None:
        """The shared experts' output (R, D); None if there are none."""
        if self.shared is None:
            return None
        return ops.shared_mlp(routed.normed, self.shared, self._mlp, self.shared_gate)

    def _combine(self, ops: Ops, slots: Array, routing: Routing, shared: Array | None) -> Array:
        """Sum all slots and ``shared``: (R, D). Both may be overwritten."""
        if self._latent_up is None:
            weighted = not self.spec.weigh_inputs
            return ops.combine_experts(slots, routing, shared, weighted=weighted)
        rows = ops.combine_experts(slots, routing, None)
        return ops.widen_latents(rows, self._latent_up, shared)

    def matrices(self) -> dict[str, Weight]:
        """The shared experts' stacked matrices by the first name of each stack.

        Routed experts are left out: each gets too few rows of a text to calibrate with.
        """
        if self._beside is not None:
            return self._beside.dense.matrices()
        if self.shared is None:
            return {}
        first = SHARED_GATE_UP[0 if self._mlp.gated else 1]
        return {first: self.shared.gate_up, SHARED_DOWN: self.shared.down}


def _experts_of_tokens(
    table: npt.NDArray[np.float32] | None, rows: int, count: int, name: str
) -> npt.NDArray[np.int32] | None:
    """A table's experts (tokens, K); None where only shapes are asked for."""
    if table is None:
        return None
    if not np.isin(table, np.arange(count)).all():
        raise CheckpointError(f"{name} has experts that are not there")
    return table.astype(np.int32).reshape(rows, -1)


class _BesideDense:
    """A dense MLP in parallel with a layer's experts (Gemma 4), with norms of both and of their
    sum.
    """

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightLoader) -> None:
        self.dense = GatedMlp(config, layer, weights, _DENSE_POST_NORM)
        prefix, names = f"model.layers.{layer}.", config.names_of(layer)
        norm = partial(weights.vector, config.hidden_size)
        self._expert_norm = norm(f"{prefix}{_EXPERT_POST_NORM}.weight")
        self._norm = norm(f"{prefix}{names.mlp_post_norm}.weight")
        self._eps = config.norm_eps

    def join(self, state: PassState, rows: Array) -> Array:
        """Return the layer's output, given the experts' ``rows`` (R, D)."""
        ops = state.ops
        normed = ops.norm_sum(rows, None, self._expert_norm, self._eps)
        return ops.norm_sum(self.dense(state), normed, self._norm, self._eps)


class Experts(Protocol):
    """Computes the experts of sparse layers."""

    @property
    def capturable(self) -> bool:
        """Whether passes run without the choices on the host, so they can be captured as graphs."""

    def begin(self, routed: Routed, state: Any) -> ExpertPass:
        """Begin a layer in a pass of ``state``: start loading the experts that its rows need."""


class ExpertPass(Protocol):
    """One layer's experts in one pass."""

    def slots(self) -> Array:
        """The chosen experts' outputs, for ``Ops.combine_experts``."""

    def end(self) -> None:
        """End the layer, also after an error."""


class ResidentExperts:
    """All experts in memory: ``tables`` has one entry per sparse layer. See ``Experts``."""

    def __init__(self) -> None:
        self.tables: dict[int, ExpertTable] = {}

    @property
    def capturable(self) -> bool:
        """Whether all layers' experts can be captured; see ``Experts``."""
        return all(table.capturable for table in self.tables.values())

    def begin(self, routed: Routed, state: PassState) -> ExpertPass:
        return _ResidentPass(state.ops, self.tables[routed.place], routed)


@dataclass(frozen=True, slots=True)
class _ResidentPass:
    ops: Ops
    table: ExpertTable
    routed: Routed

    def slots(self) -> Array:
        routed = self.routed
        slots = self.ops.expert_slots(routed.rows, routed.routing)
        self.ops.run_experts(routed.rows, routed.routing, self.table, routed.spec, slots)
        return slots

    def end(self) -> None:
        """Nothing to do."""


def load_expert(
    config: DecoderConfig, layer: int, number: int, weights: WeightLoader
) -> ExpertWeights:
    """One expert's weights."""
    spec = config.mixture(layer)
    assert spec is not None, "a dense layer has no experts"
    hidden = spec.latent or config.hidden_size
    *gate_up, down = (f"model.layers.{layer}.{name}" for name in expert_matrices(number))
    if not spec.expert.gated:
        gate_up = gate_up[1:]
    optional, biased, wide = weights.optional_vector, spec.expert_bias, len(gate_up) * spec.inner
    return ExpertWeights(
        gate_up=weights.matrix((wide, hidden), *(f"{name}.weight" for name in gate_up)),
        down=weights.matrix((hidden, spec.inner), f"{down}.weight"),
        gate_up_bias=optional(biased, wide, *(f"{name}.bias" for name in gate_up)),
        down_bias=optional(biased, hidden, f"{down}.bias"),
    )
