"""A mixture of experts in a block's MLP: norm, router, the chosen experts, those that all rows see.

The experts' weights are units of their own, in an ``ExpertTable`` that may hold all of them (a
resident model) or some (a placed one, whose runtime brings the others in between). Config ->
router -> experts -> sum; it does not know where experts are or when they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from localrt.errors import CheckpointError
from localrt.models.weights import WeightLoader
from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertTable,
    ExpertWeights,
    RouterSpec,
    RouterWeights,
    Routing,
)
from localrt.quant.ops.protocol import Array, MlpSpec, MlpWeights, Ops

__all__ = ["MixtureNames", "MixtureSpec", "Routed", "SparseMlp", "load_expert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """A layer's mixture. ``inner`` is an expert's width, ``shared`` that of the shared experts."""

    router: RouterSpec
    expert: ExpertSpec
    inner: int
    shared: int = 0
    shared_gate: bool = False
    gate_bias: bool = False
    choice_bias: bool = False
    expert_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureNames:
    """A sparse layer's tensors, below ``model.layers.N.``; ``{}`` is an expert's number."""

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    gate_up: tuple[str, str] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, str] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    )
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"

    def expert(self, number: int) -> tuple[str, ...]:
        """The matrices of one expert: gate, up, down."""
        return tuple(name.format(number) for name in (*self.gate_up, self.down))


@dataclass(frozen=True, slots=True)
class Routed:
    """A sparse layer between its router and its experts' results."""

    normed: Array  # (R, D)
    routing: Routing


class SparseMlp:
    """Norm, router and shared experts; ``table`` holds the experts that are in memory.

    ``watch`` is told of every choice. Raises CheckpointError where a router gives no numbers.
    """

    def __init__(
        self,
        spec: MixtureSpec,
        mlp: MlpSpec,
        hidden: int,
        norm: str,
        names: MixtureNames,
        prefix: str,
        weights: WeightLoader,
        table: ExpertTable,
    ) -> None:
        self.spec = spec
        self.table = table
        self.watch: Callable[[Routing], None] | None = None
        self._mlp = mlp
        self._prefix = prefix
        count = spec.router.count
        self.router = RouterWeights(
            norm=weights.vector(hidden, f"{prefix}{norm}.weight"),
            gate=weights.matrix((count, hidden), f"{prefix}{names.router}.weight"),
            gate_bias=weights.vector(count, f"{prefix}{names.router}.bias")
            if spec.gate_bias
            else None,
            choice_bias=weights.vector(count, f"{prefix}{names.choice_bias}")
            if spec.choice_bias
            else None,
        )
        self.shared: MlpWeights | None = None
        self.shared_gate = None
        if spec.shared:
            gate_up = (f"{prefix}{name}.weight" for name in names.shared_gate_up)
            down = f"{prefix}{names.shared_down}.weight"
            self.shared = MlpWeights(
                norm=None,
                gate_up=weights.matrix((2 * spec.shared, hidden), *gate_up),
                down=weights.matrix((hidden, spec.shared), down),
            )
        if spec.shared_gate:
            self.shared_gate = weights.matrix((1, hidden), f"{prefix}{names.shared_gate}.weight")

    def __call__(self, ops: Ops, x: Array) -> Array:
        """(R, D) to (R, D), with every expert that is chosen in the table."""
        routed = self.route(ops, x)
        slots = ops.expert_slots(routed.normed, routed.routing)
        ops.run_experts(routed.normed, routed.routing, self.table, self.spec.expert, slots)
        return ops.combine_experts(slots, routed.routing, self.shared_rows(ops, routed))

    def route(self, ops: Ops, x: Array) -> Routed:
        """The normed rows and their experts."""
        normed, routing = ops.norm_route(x, self.router, self.spec.router)
        if not np.isfinite(routing.weights).all():
            raise CheckpointError(
                f"{self._prefix}mlp: the router's scores are not numbers: the weights are damaged, "
                "or the layers before it overflow; download or quantize the model again"
            )
        if self.watch is not None:
            self.watch(routing)
        return Routed(normed, routing)

    def shared_rows(self, ops: Ops, routed: Routed) -> Array | None:
        """What the experts give that every row sees, (R, D); None where there are none."""
        if self.shared is None:
            return None
        return ops.shared_mlp(routed.normed, self.shared, self._mlp, self.shared_gate)


def load_expert(
    spec: MixtureSpec,
    hidden: int,
    number: int,
    names: MixtureNames,
    prefix: str,
    weights: WeightLoader,
) -> ExpertWeights:
    """One expert's weights."""
    gate, up, down = (f"{prefix}{name}" for name in names.expert(number))
    biased = spec.expert_bias
    return ExpertWeights(
        gate_up=weights.matrix((2 * spec.inner, hidden), f"{gate}.weight", f"{up}.weight"),
        down=weights.matrix((hidden, spec.inner), f"{down}.weight"),
        gate_up_bias=weights.vector(2 * spec.inner, f"{gate}.bias", f"{up}.bias")
        if biased
        else None,
        down_bias=weights.vector(hidden, f"{down}.bias") if biased else None,
    )
