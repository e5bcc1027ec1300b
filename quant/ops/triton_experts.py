"""The steps of a mixture of experts on a card, for ``TritonOps`` to inherit.

Routing is decided on the host, since it says which weights are needed: a pass of a mixture waits
for its router in every layer, and is not recorded as a CUDA graph. Each expert's products are the
kernels of a dense MLP on the rows that chose it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertWeights,
    RouterSpec,
    RouterWeights,
    Routing,
)
from localrt.quant.ops.protocol import MlpSpec, MlpWeights
from localrt.quant.ops.torch_experts import TorchExpertSteps, gated, route
from localrt.quant.ops.triton_steps import norm

if TYPE_CHECKING:
    from localrt.quant.ops.triton_pass import Stream

__all__ = ["TritonExperts"]


class TritonExperts(TorchExpertSteps):
    """Needs ``linear`` and ``_gated`` of ``TritonOps``."""

    def linear(self, x: Tensor, weight: Any, bias: Any = None, *, dtype: Any = ...) -> Tensor:
        """See ``TritonOps``."""
        raise NotImplementedError

    def _gated(self, h: Tensor, weight: Any, activation: str) -> Tensor:
        raise NotImplementedError

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
