"""Experts and routers as the compiled kernels take them.

A table of experts is an array of C structs that stays where it is: putting an expert writes one of
them. What the kernels do is in ``quant/csrc/experts.h`` and ``routing.h``; where experts come from
is not known here.
"""

from __future__ import annotations

import ctypes

from localrt.quant.ops.experts import ExpertSpec, ExpertWeights, RouterSpec, RouterWeights
from localrt.quant.ops.native.abi import SCORINGS, ExpertArgs, ExpertParts, RouteArgs
from localrt.quant.ops.native.weights import address_of

__all__ = ["NativeExpertTable", "route_args"]


class NativeExpertTable:
    """See ``ExpertTable``. All experts of a table have one shape, but any formats."""

    hostless = False

    def __init__(self, count: int) -> None:
        self._parts = (ExpertParts * count)()
        self._weights: list[ExpertWeights | None] = [None] * count
        self._shape: tuple[int, int, int] | None = None
        self.args = ExpertArgs(table=ctypes.addressof(self._parts), count=count)

    def takes(self, spec: ExpertSpec) -> bool:
        """Whether the experts have the matrices that ``spec`` computes with."""
        if self._shape is None:
            return True
        _, inner, rows = self._shape
        return rows == (2 if spec.gated else 1) * inner

    def put(self, expert: int, weights: ExpertWeights) -> None:
        """Point at an expert's weights, which stay where they are.

        Raises:
            ValueError: there is no such number, or shapes that do not fit.
        """
        if not 0 <= expert < len(self._weights):
            raise ValueError(f"expert {expert} of {len(self._weights)} does not exist")
        gate_up, down = weights.gate_up.stack, weights.down.stack
        self._require_fit(expert, weights)
        parts = self._parts[expert]
        parts.down = down
        parts.gate_up_bias = address_of(weights.gate_up_bias)
        parts.down_bias = address_of(weights.down_bias)
        parts.gate_up = gate_up
        self._weights[expert] = weights

    def drop(self, expert: int) -> None:
        """Forget an expert."""
        self._parts[expert].gate_up.count = 0
        self._weights[expert] = None

    def holds(self, expert: int) -> bool:
        """Whether it is here."""
        return 0 <= expert < len(self._weights) and self._weights[expert] is not None

    def _require_fit(self, expert: int, weights: ExpertWeights) -> None:
        gate_up, down = weights.gate_up.stack, weights.down.stack
        hidden, inner = down.rows, down.cols
        if gate_up.rows not in (inner, 2 * inner) or gate_up.cols != hidden:
            raise ValueError(
                f"expert {expert}: gate and up are {gate_up.rows} x {gate_up.cols}, "
                f"down is {hidden} x {inner}"
            )
        for bias, size in ((weights.gate_up_bias, gate_up.rows), (weights.down_bias, hidden)):
            if bias is not None and bias.values.size != size:
                raise ValueError(f"expert {expert}: a bias has {bias.values.size} of {size} values")
        shape = (hidden, inner, gate_up.rows)
        if self._shape is None:
            self._shape = shape
        elif self._shape != shape:
            raise ValueError(f"expert {expert} is {hidden} x {inner}, others are {self._shape[:2]}")


def route_args(weights: RouterWeights, spec: RouterSpec) -> RouteArgs:
    """The arguments that stay, made once for a router."""
    kept = weights.gate.call
    if kept is not None and kept[0] is weights and kept[1] is spec:
        args: RouteArgs = kept[2]
        return args
    args = RouteArgs(
        norm=address_of(weights.norm),
        gate_bias=address_of(weights.gate_bias),
        choice_bias=address_of(weights.choice_bias),
        gate_norm=address_of(weights.gate_norm),
        expert_scale=address_of(weights.expert_scale),
        gate=weights.gate.stack,
        used=spec.used,
        ranked=spec.ranked,
        scoring=SCORINGS[spec.scoring],
        normalize=spec.normalize,
        groups=spec.groups,
        used_groups=spec.used_groups,
        group_top=spec.group_top,
        eps=spec.eps,
        scale=spec.scale,
    )
    weights.gate.call = (weights, spec, args)
    return args
