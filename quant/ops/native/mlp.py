"""MLPs on the native kernels: gated ones, and mixtures of experts (``ExpertOps``).

One call computes every expert of a layer that a pass asks for. A table of experts is an array of C
structs that stays where it is: putting an expert writes one of them. What the kernels do is in
``quant/csrc/experts.h`` and ``routing.h``; where experts come from is not known here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertTable,
    ExpertWeights,
    RouterSpec,
    RouterWeights,
    Routing,
)
from localrt.quant.ops.native.abi import (
    ACTIVATIONS,
    SCORINGS,
    ExpertArgs,
    ExpertParts,
    MlpArgs,
    RouteArgs,
)
from localrt.quant.ops.native.weights import NativeWeight, address_of, locate
from localrt.quant.ops.protocol import MlpSpec, MlpWeights

__all__ = ["NativeExpertTable", "NativeMlps"]

Floats = npt.NDArray[np.float32]


class NativeExpertTable:
    """See ``ExpertTable``. All experts of a table have one shape, but any formats."""

    def __init__(self, count: int) -> None:
        self._parts = (ExpertParts * count)()
        self._weights: list[ExpertWeights | None] = [None] * count
        self._shape: tuple[int, int] | None = None
        self.args = ExpertArgs(table=ctypes.addressof(self._parts), count=count)

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
        if (gate_up.rows, gate_up.cols) != (2 * inner, hidden):
            raise ValueError(
                f"expert {expert}: gate and up are {gate_up.rows} x {gate_up.cols}, "
                f"down is {hidden} x {inner}"
            )
        for bias, size in ((weights.gate_up_bias, 2 * inner), (weights.down_bias, hidden)):
            if bias is not None and bias.values.size != size:
                raise ValueError(f"expert {expert}: a bias has {bias.values.size} of {size} values")
        if self._shape is None:
            self._shape = (hidden, inner)
        elif self._shape != (hidden, inner):
            raise ValueError(f"expert {expert} is {hidden} x {inner}, others are {self._shape}")


class NativeMlps:
    """The MLP steps of ``NativeOps``."""

    _api: ctypes.CDLL
    _handle: Any  # of the library
    _spare: dict[tuple[int, ...], Floats]
    _slots: Floats | None = None  # what was given up last

    def norm_gated_mlp(self, x: Floats, weights: MlpWeights, spec: MlpSpec) -> Floats:
        """(R, D)."""
        return self._gated_mlp(x, weights, spec, None)

    def shared_mlp(
        self, normed: Floats, weights: MlpWeights, spec: MlpSpec, gate: NativeWeight | None
    ) -> Floats:
        """(R, D)."""
        return self._gated_mlp(normed, weights, spec, gate)

    def expert_table(self, count: int) -> NativeExpertTable:
        """An empty table."""
        return NativeExpertTable(count)

    def norm_route(
        self, x: Floats, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Floats, Routing]:
        """(R, D), and the choices."""
        rows, hidden = x.shape
        args = _route_args(weights, spec)
        ranked, used = args.ranked, args.used
        normed = self._array(rows, hidden)
        # One array behind all three results: asking where an array lies costs as much as making it.
        results = np.empty(rows * (2 * ranked + used), np.float32)
        address, plane = locate(results), rows * ranked
        args.x, args.normed = locate(x), locate(normed)
        args.experts, args.scores, args.weights = (
            address,
            address + 4 * plane,
            address + 8 * plane,
        )
        args.rows = rows
        self._api.lrt_norm_route(self._handle, args)
        return normed, Routing(
            results[:plane].view(np.int32).reshape(rows, ranked),
            results[plane : 2 * plane].reshape(rows, ranked),
            results[2 * plane :].reshape(rows, used),
        )

    def expert_slots(self, normed: Floats, routing: Routing) -> Floats:
        """(R * K, D): the array that was given up last, if it fits."""
        shape = (routing.weights.size, normed.shape[1])
        spare, self._slots = self._slots, None
        return spare if spare is not None and spare.shape == shape else np.empty(shape, np.float32)

    def run_experts(
        self,
        normed: Floats,
        routing: Routing,
        table: ExpertTable,
        spec: ExpertSpec,
        slots: Floats,
        experts: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> None:
        """All of ``experts`` in one call.

        Raises:
            ValueError: one of them is not in the table; nothing is computed then.
        """
        assert isinstance(table, NativeExpertTable), "tables belong to one implementation"
        args = table.args
        chosen = np.ascontiguousarray(routing.experts, np.int32)
        args.rows, args.stride = chosen.shape
        args.used = routing.used
        if slots.shape != (args.rows * args.used, normed.shape[1]):
            raise ValueError(f"slots are {slots.shape}, of {args.rows} rows with {args.used} each")
        args.x, args.slots, args.chosen = locate(normed), locate(slots), locate(chosen)
        args.activation, args.limit = ACTIVATIONS[spec.activation], spec.limit
        args.asked, args.asked_count = None, 0
        if experts is not None:
            asked = np.ascontiguousarray(experts, np.int32)
            if not asked.size:
                return
            args.asked, args.asked_count = locate(asked), asked.size
        missing = self._api.lrt_run_experts(self._handle, args)
        if missing >= 0:
            raise ValueError(f"expert {missing} is asked for, but is not in the table")

    def put_slots(self, slots: Floats, index: npt.NDArray[np.intp], rows: Floats) -> Floats:
        """In place."""
        slots[index] = rows
        return slots

    def combine_experts(self, slots: Floats, routing: Routing, shared: Floats | None) -> Floats:
        """(R, D)."""
        weights = np.ascontiguousarray(routing.weights, np.float32)
        (rows, used), hidden = weights.shape, slots.shape[1]
        out = self._array(rows, hidden) if shared is None else shared
        self._api.lrt_combine_experts(
            self._handle,
            locate(slots),
            locate(weights),
            None if shared is None else locate(shared),
            rows,
            used,
            hidden,
            locate(out),
        )
        self._slots = slots
        return out

    def _gated_mlp(
        self, x: Floats, weights: MlpWeights, spec: MlpSpec, gate: NativeWeight | None
    ) -> Floats:
        out = self._array(x.shape[0], weights.down.stack.rows)
        args = MlpArgs(
            x=locate(x),
            out=locate(out),
            norm=address_of(weights.norm),
            post_norm=address_of(weights.post_norm),
            gate_up=weights.gate_up.stack,
            down=weights.down.stack,
            rows=x.shape[0],
            activation=ACTIVATIONS[spec.activation],
            eps=spec.eps,
        )
        if gate is not None:
            args.row_gate = gate.stack
        self._api.lrt_norm_gated_mlp(self._handle, args)
        return out

    def _array(self, rows: int, cols: int) -> Floats:
        """An array that the pass before gave up, or a new one: fresh pages cost more than a row."""
        spare = self._spare.pop((rows, cols), None)
        return np.empty((rows, cols), np.float32) if spare is None else spare


def _route_args(weights: RouterWeights, spec: RouterSpec) -> RouteArgs:
    """The arguments that stay, made once for a router."""
    kept = weights.gate.call
    if kept is not None and kept[0] is weights and kept[1] is spec:
        args: RouteArgs = kept[2]
        return args
    args = RouteArgs(
        norm=address_of(weights.norm),
        gate_bias=address_of(weights.gate_bias),
        choice_bias=address_of(weights.choice_bias),
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
