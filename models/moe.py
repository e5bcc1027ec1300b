"""A mixture of experts in a block's MLP: norm, router, the chosen experts, those that all rows see.

The experts' weights are units of their own. Who computes the chosen ones is an ``Experts``: with
all of them in memory ``ResidentExperts``, else one that brings them in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from localrt.errors import CheckpointError
from localrt.models.config import (
    CHOICE_BIAS,
    ROUTER,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_GATE_UP,
    DecoderConfig,
    expert_matrices,
)
from localrt.models.parts import PassState
from localrt.models.weights import WeightLoader
from localrt.quant.ops.experts import ExpertTable, ExpertWeights, RouterWeights, Routing
from localrt.quant.ops.protocol import Array, MlpWeights, Ops, Weight

__all__ = ["Experts", "ResidentExperts", "Routed", "RoutingWatch", "SparseMlp", "load_expert"]

RoutingWatch = Callable[[int, Routing], None]
"""Told of every choice of experts, with the layer's number among the sparse ones."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A sparse layer between its router and its experts' results."""

    normed: Array  # (R, D)
    routing: Routing


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
        self._mlp = config.mlp
        prefix = f"model.layers.{layer}."
        count = spec.router.count
        self.router = RouterWeights(
            norm=weights.vector(hidden, f"{prefix}{config.names.mlp_norm}.weight"),
            gate=weights.matrix((count, hidden), f"{prefix}{ROUTER}.weight"),
            gate_bias=weights.optional_vector(spec.gate_bias, count, f"{prefix}{ROUTER}.bias"),
            choice_bias=weights.optional_vector(spec.choice_bias, count, prefix + CHOICE_BIAS),
        )
        self.shared: MlpWeights | None = None
        self.shared_gate = None
        if spec.shared:
            gate_up = (f"{prefix}{name}.weight" for name in SHARED_GATE_UP)
            down = f"{prefix}{SHARED_DOWN}.weight"
            self.shared = MlpWeights(
                norm=None,
                gate_up=weights.matrix((2 * spec.shared, hidden), *gate_up),
                down=weights.matrix((hidden, spec.shared), down),
            )
        if spec.shared_gate:
            self.shared_gate = weights.matrix((1, hidden), f"{prefix}{SHARED_GATE}.weight")

    def __call__(self, state: PassState) -> Array:
        """See ``Layer``."""
        return self.experts.run(self, state)

    def route(self, ops: Ops, x: Array) -> Routed:
        """The normed rows and their experts, of which the host may not know yet.

        Raises:
            CheckpointError: the router gives no numbers, as far as the host knows.
        """
        normed, routing = ops.norm_route(x, self.router, self.spec.router)
        if self.experts.watch is not None or not routing.away:
            self.read(routing)
        return Routed(normed, routing)

    def read(self, routing: Routing) -> None:
        """The host needs the choice: it is waited for.

        Raises:
            CheckpointError: the router gives no numbers.
        """
        if not np.isfinite(routing.weights).all():
            raise CheckpointError(
                f"model.layers.{self.layer}.mlp: the router's scores are not numbers: the weights "
                "are damaged, or the layers before it overflow; download or quantize the model "
                "again"
            )
        if self.experts.watch is not None:
            self.experts.watch(self.place, routing)

    def shared_rows(self, ops: Ops, routed: Routed) -> Array | None:
        """What the experts give that every row sees, (R, D); None where there are none."""
        if self.shared is None:
            return None
        return ops.shared_mlp(routed.normed, self.shared, self._mlp, self.shared_gate)

    def matrices(self) -> dict[str, Weight]:
        """The shared experts' stacked matrices by the first name in each.

        Not the others': few rows of a text reach each of them, too few to calibrate by.
        """
        if self.shared is None:
            return {}
        return {SHARED_GATE_UP[0]: self.shared.gate_up, SHARED_DOWN: self.shared.down}


class Experts(Protocol):
    """Who computes the experts of sparse layers. ``watch`` is told of every choice."""

    watch: RoutingWatch | None

    @property
    def hostless(self) -> bool:
        """Whether passes run without the host knowing the choices: they can be recorded."""

    def run(self, part: SparseMlp, state: Any) -> Array:
        """The layer's sum for ``state.x``, a ``PassState``'s: (R, D)."""


class ResidentExperts:
    """All experts in memory, in ``tables`` by the layers' places. See ``Experts``."""

    def __init__(self) -> None:
        self.tables: dict[int, ExpertTable] = {}
        self.watch: RoutingWatch | None = None

    @property
    def hostless(self) -> bool:
        """See ``Experts``; dense layers have none."""
        return self.watch is None and all(table.hostless for table in self.tables.values())

    def run(self, part: SparseMlp, state: PassState) -> Array:
        """See ``Experts``."""
        ops, routed = state.ops, part.route(state.ops, state.x)
        slots = ops.expert_slots(routed.normed, routed.routing)
        table, spec = self.tables[part.place], part.spec.expert
        ops.run_experts(routed.normed, routed.routing, table, spec, slots)
        return ops.combine_experts(slots, routed.routing, part.shared_rows(ops, routed))


def load_expert(
    config: DecoderConfig, layer: int, number: int, weights: WeightLoader
) -> ExpertWeights:
    """One expert's weights."""
    spec, hidden = config.mixture(layer), config.hidden_size
    assert spec is not None, "a dense layer has no experts"
    gate, up, down = (f"model.layers.{layer}.{name}" for name in expert_matrices(number))
    optional, biased = weights.optional_vector, spec.expert_bias
    return ExpertWeights(
        gate_up=weights.matrix((2 * spec.inner, hidden), f"{gate}.weight", f"{up}.weight"),
        down=weights.matrix((hidden, spec.inner), f"{down}.weight"),
        gate_up_bias=optional(biased, 2 * spec.inner, f"{gate}.bias", f"{up}.bias"),
        down_bias=optional(biased, hidden, f"{down}.bias"),
    )
