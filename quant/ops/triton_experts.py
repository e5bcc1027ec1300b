"""The steps of a mixture of experts on a card, for ``TritonOps`` to inherit.

Routing is decided on the host, since it says which weights are needed: a pass of a mixture waits
for its router in every layer, and is not recorded as a CUDA graph. Each expert's products are the
kernels of a dense MLP on the rows that chose it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
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
from localrt.quant.ops.torch_experts import TorchExpertTable, gated, route, slots_of
from localrt.quant.ops.triton_steps import norm

if TYPE_CHECKING:
    from localrt.quant.ops.triton_pass import Stream

__all__ = ["TritonExperts"]


class TritonExperts:
    """Needs ``linear`` and ``_gated`` of ``TritonOps``."""

    _device: torch.device

    def linear(self, x: Tensor, weight: Any, bias: Any = None, *, dtype: Any = ...) -> Tensor:
        """See ``TritonOps``."""
        raise NotImplementedError

    def _gated(self, h: Tensor, weight: Any, activation: str) -> Tensor:
        raise NotImplementedError

    def expert_table(self, count: int) -> TorchExpertTable:
        """An empty table."""
        return TorchExpertTable(count)

    def norm_route(
        self, x: Stream, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Tensor, Routing]:
        """The normed rows (R, D), bf16, and their experts; the router sees them in float32."""
        normed = norm(x.settle(), weights.norm, spec.eps, out=torch.float32)
        parts = [part for part in weights.gate.parts if isinstance(part, Tensor)]
        if len(parts) == len(weights.gate.parts) and not weights.gate.hadamard:
            logits = torch.cat([F.linear(normed, part.float()) for part in parts], dim=1)
        else:
            logits = self.linear(normed.bfloat16(), weights.gate, dtype=torch.float32)
        if weights.gate_bias is not None:
            logits = logits + weights.gate_bias
        return normed.bfloat16(), route(logits, weights.choice_bias, spec)

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
        """Fill the slots of each expert with one pass over its rows."""
        assert isinstance(table, TorchExpertTable), "tables belong to one implementation"
        for expert, filled in slots_of(routing, experts):
            index = torch.from_numpy(filled).to(self._device)
            slots[index] = self._expert(normed[index // routing.used], table[expert], spec)

    def put_slots(
        self, slots: Tensor, index: npt.NDArray[np.intp], rows: Stream | Tensor
    ) -> Tensor:
        """In place. Rows of the CPU come as a residual stream."""
        values = rows if isinstance(rows, Tensor) else rows.settle()
        slots[torch.from_numpy(index).to(self._device)] = values
        return slots

    def combine_experts(self, slots: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        """(R, D), float32, one k after another."""
        weights = torch.from_numpy(routing.weights).to(self._device)
        parts = slots.view(-1, routing.used, slots.shape[1])
        total = parts[:, 0] * weights[:, :1]
        for k in range(1, routing.used):
            total += parts[:, k] * weights[:, k : k + 1]
        return total if shared is None else total + shared

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
