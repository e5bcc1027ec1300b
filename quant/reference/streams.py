"""Torch's steps of layers' own inputs and of several residual streams: see ``Ops``.

Streams (R, S * D) are looked at as (R, S, D). The sums over streams are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.ops.hybrid_cache import begin_states
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.ops.streams import (
    LEAST_PRODUCT,
    ConnectionWeights,
    InputGateSpec,
    InputGateWeights,
    InputProjection,
    NgramWeights,
)
from localrt.quant.reference.recurrent import convolve_rows


def rows_of_tokens(ids: Tensor, each: int, rows: int) -> Tensor:
    """See ``quant.ops.streams.rows_of_tokens``; ``ids`` may be on a device."""
    known = torch.where(ids < rows // each, ids, 0)
    return (known[:, None] * each + torch.arange(each, device=ids.device)).flatten()


class StreamSteps:
    """A part of ``TorchOps``."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A product."""
        raise NotImplementedError

    def _norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        raise NotImplementedError

    def project_inputs(self, x: Tensor, rows: Tensor, weights: InputProjection) -> Tensor:
        projected = self.linear(x, weights.matrix).view(len(x), -1, weights.width)
        normed = self._norm(projected, weights.norm, weights.eps)
        return rows.view(len(x), -1) + normed.flatten(1)

    def gate_inputs(
        self, x: Tensor, inputs: Tensor, weights: InputGateWeights, spec: InputGateSpec
    ) -> Tensor:
        gate = self.linear(x, weights.gate)
        first = spec.layer * spec.width
        open_ = F.silu(gate) if spec.activation == "silu" else F.gelu(gate, approximate="tanh")
        y = self.linear(open_ * inputs[:, first : first + spec.width], weights.out)
        return self._norm(y, weights.post_norm, spec.eps)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, *, centered: bool = True) -> Tensor:
        if centered:
            return F.layer_norm(x, weight.shape, weight, None, eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def repeat_stream(self, x: Tensor, count: int) -> Tensor:
        return x.repeat(1, count)

    def read_streams(
        self, streams: Tensor, weights: ConnectionWeights
    ) -> tuple[Tensor, Tensor | None]:
        count = weights.count
        apart = streams.view(len(streams), count, -1)
        normed = F.rms_norm(apart, apart.shape[-1:], None, weights.eps)
        joined = normed.flatten(1) * weights.norm
        narrow = F.silu(self.linear(joined, weights.down) / count)
        gates = self.linear(narrow, weights.up).sigmoid()
        x = (gates * joined).view_as(apart).mean(1)
        if weights.share is None:
            return x, None
        return x, 2 * (self.linear(joined, weights.share) / count).sigmoid()

    def share_out(self, streams: Tensor, y: Tensor, shares: Tensor) -> Tensor:
        streams.view(len(y), -1, y.shape[1]).addcmul_(y[:, None], shares[:, :, None])
        return streams

    def add_ngrams(
        self,
        streams: Tensor,
        rows: Tensor,
        weights: NgramWeights,
        spec: RecurrentSpec,
        step: Any,
        layer: int,
    ) -> Tensor:
        """(R, S * D), in place."""
        if not step.states:
            step.states = begin_states(step.spans)
        count, eps = weights.count, weights.eps
        rows = rows.view(len(streams), -1)
        keys = _norm_each(self.linear(rows, weights.key), weights.key_norm, count, eps)
        seen = _norm_each(streams, weights.stream_norm, count, eps)
        size = keys.shape[1] // count
        products = (keys * seen).view(-1, count, size).sum(2, keepdim=True) / size**0.5
        gates = (products.abs().clamp(min=LEAST_PRODUCT).sqrt() * products.sign()).sigmoid()
        values = (gates * self.linear(rows, weights.value).float()[:, None]).flatten(1)
        normed = _norm_each(values, weights.value_norm, count, eps)
        kept = torch.cat([normed, step.tokens[:, None].float()], dim=1)
        mixed = convolve_rows(kept, weights.taps, spec, step.spans, step.states, layer)
        return streams.add_((values + F.silu(mixed)).to(streams.dtype))


def _norm_each(x: Tensor, weight: Tensor, count: int, eps: float) -> Tensor:
    """(R, S * D), float32: RMSNorm of each stream for itself."""
    apart = x.float().view(len(x), count, -1)
    return F.rms_norm(apart, apart.shape[-1:], None, eps).flatten(1) * weight.float()
