"""The steps of a mixture of experts on a card, for ``TritonOps`` to inherit.

Routing is decided on the host, since it says which weights are needed: a pass of a mixture waits
for its router in every layer, and is not recorded as a CUDA graph. All experts of a kind are two
launches (``triton_grouped.py``); others are products of their own, as a dense MLP has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertTable,
    ExpertWeights,
    RouterSpec,
    RouterWeights,
    Routing,
)
from localrt.quant.ops.protocol import MlpSpec, MlpWeights
from localrt.quant.ops.torch.experts import TorchExpertSteps, gated, route
from localrt.quant.ops.triton import device as triton_device
from localrt.quant.ops.triton.expert_table import ExpertKind, TritonExpertTable
from localrt.quant.ops.triton.grouped import Plan, grouped_down, grouped_gate_up, plan_blocks
from localrt.quant.ops.triton.linear import MOST_ROWS
from localrt.quant.ops.triton.mixture import combined, router_logits
from localrt.quant.ops.triton.steps import rotate_blocks

if TYPE_CHECKING:
    from localrt.quant.ops.triton.stream import Stream

__all__ = ["TritonExperts", "run_kind"]


class TritonExperts(TorchExpertSteps):
    """Needs ``linear`` and ``_gated`` of ``TritonOps``."""

    def linear(self, x: Tensor, weight: Any, bias: Any = None, *, dtype: Any = ...) -> Tensor:
        """See ``TritonOps``."""
        raise NotImplementedError

    def _gated(self, h: Tensor, weight: Any, activation: str) -> Tensor:
        raise NotImplementedError

    def expert_table(self, count: int) -> TritonExpertTable:
        """See ``ExpertOps``."""
        return TritonExpertTable(count)

    def norm_route(
        self, x: Stream, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Tensor, Routing]:
        """The normed rows (R, D), bf16, and their experts; the router sees them in float32."""
        normed = x.normed(weights.norm, spec.eps, torch.float32)
        gate, rows = weights.gate, normed.bfloat16()
        if gate.hadamard or not all(isinstance(part, Tensor) for part in gate.parts):
            logits = self.linear(rows, gate, dtype=torch.float32)
        else:
            shape = (len(normed), gate.shape[0])
            logits = torch.empty(shape, dtype=torch.float32, device=self._device)
            first = 0
            for part in gate.parts:
                stop = first + len(part)
                router_logits(normed, part, logits[:, first:stop])
                first = stop
        if weights.gate_bias is not None:
            logits += weights.gate_bias
        bias = weights.choice_bias
        if len(logits) <= MOST_ROWS:  # ranking few rows is quicker on the host: one copy, one wait
            both = logits if bias is None else torch.cat([logits, bias[None]])
            both = both.cpu()
            logits, bias = both[: len(rows)], None if bias is None else both[-1]
        return rows, route(logits, bias, spec)

    def expert_slots(self, normed: Tensor, routing: Routing) -> Tensor:
        """(R * K, D), float32."""
        shape = (normed.shape[0] * routing.used, normed.shape[1])
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def run_experts(
        self,
        normed: Tensor,
        routing: Routing,
        table: ExpertTable,
        spec: ExpertSpec,
        slots: Tensor,
        experts: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Fill slots: experts of a kind together, whoever else was asked for.

        How a row is computed follows from its expert and from whether the pass is long.
        """
        assert isinstance(table, TritonExpertTable), "tables belong to one implementation"
        chosen = routing.chosen.reshape(-1)
        order = np.argsort(chosen, kind="stable")
        if experts is not None:
            order = order[np.isin(chosen[order], np.asarray(experts))]
        if not len(order):
            return
        ranked = table.kind_of[chosen[order]]
        for number in np.unique(ranked).tolist():
            own = order[ranked == number]
            found, counts = np.unique(chosen[own], return_counts=True)
            if number < 0:
                super().run_experts(normed, routing, table, spec, slots, found)
                continue
            long = len(normed) > MOST_ROWS
            plan = plan_blocks(
                table.places[found], counts, own, routing.used, self._device, long=long
            )
            run_kind(normed, plan, table.kinds[number], spec, slots)

    def put_slots(self, slots: Tensor, index: npt.NDArray[np.intp], rows: Any) -> Tensor:
        """In place. Rows of the CPU may come as a residual stream."""
        values = rows if isinstance(rows, Tensor) else rows.settle()
        slots[triton_device.upload(index, self._device)] = values.to(slots.dtype)
        return slots

    def combine_experts(self, slots: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        """(R, D), float32: summed one k after another."""
        return combined(slots, triton_device.upload(routing.weights, self._device), shared)

    def shared_mlp(
        self, normed: Tensor, weights: MlpWeights, spec: MlpSpec, gate: Any | None
    ) -> Tensor:
        """(R, D), float32."""
        inner = self._gated(normed, weights.gate_up, spec.activation)
        y = self.linear(inner, weights.down, dtype=torch.float32)
        if gate is None:
            return y
        return y * self.linear(normed, gate, dtype=torch.float32).sigmoid()

    def _expert(self, rows: Tensor, weights: ExpertWeights, spec: ExpertSpec) -> Tensor:
        if weights.gate_up_bias is None and spec.activation != "swiglu_oai":
            inner = self._gated(rows, weights.gate_up, spec.activation)
        else:
            both = self.linear(rows, weights.gate_up, weights.gate_up_bias, dtype=torch.float32)
            inner = gated(both, spec).bfloat16()
        return self.linear(inner, weights.down, weights.down_bias, dtype=torch.float32)


def run_kind(normed: Tensor, plan: Plan, kind: ExpertKind, spec: ExpertSpec, slots: Tensor) -> None:
    """Two launches, and the rotations that the weights ask for."""
    outer, within = kind.rotated
    x = rotate_blocks(normed, outer) if outer else normed
    inner = grouped_gate_up(x, plan, kind.gate_up, spec.activation, spec.limit)
    if within:
        inner = rotate_blocks(inner, within)
    grouped_down(inner, slots, plan, kind.down)
