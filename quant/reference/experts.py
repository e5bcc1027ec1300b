"""The mixture's own arithmetic on torch: routing, slots and their sums, the gated activations.

Written to be read, as the oracle of the kernels. It knows neither the experts' products nor where
their weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.ops.experts import ExpertSpec, RouterSpec, Routing, slots_of
from localrt.quant.ops.protocol import MlpSpec

_GATE_SIGMOID = 1.702  # ``swiglu_oai``
_LEAST_SUM = 1e-20  # scores that all vanish are not divided by nothing


def route(
    logits: Tensor, choice_bias: Tensor | None, spec: RouterSpec, expert_scale: Tensor | None = None
) -> Routing:
    """Experts of rows by their logits (R, E), float32.

    A row whose logits are not all finite gets weights that are not.
    """
    finite = logits.isfinite().all(-1, keepdim=True)
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
    if spec.scoring == "sqrt-softplus":
        scores = F.softplus(logits).sqrt()
    # By the logits themselves, scores being equal where a softmax vanishes.
    rank = logits if spec.scoring == "softmax-chosen" else scores
    if choice_bias is not None:
        rank = rank + choice_bias.float()
    order = rank.sort(dim=-1, descending=True, stable=True).indices  # ties: the lower number
    if spec.groups > 1:
        allowed = _in_used_groups(rank, spec).gather(1, order)
        first = allowed.int().sort(dim=-1, descending=True, stable=True).indices
        order = order.gather(1, first)
    order = order[:, : spec.ranked]
    chosen = order[:, : spec.used]
    if spec.scoring == "softmax-chosen":
        weights = logits.gather(1, chosen).softmax(-1)
    else:
        weights = scores.gather(1, chosen)
        if spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    weights = weights * spec.scale
    if expert_scale is not None:
        weights = weights * expert_scale.float()[chosen]
    weights = weights.masked_fill(~finite, float("nan"))
    return Routing(
        order.to(torch.int32).cpu().numpy(),
        scores.gather(1, order).cpu().numpy(),
        weights.cpu().numpy(),
    )


def run_each(
    normed: Tensor,
    routing: Routing,
    slots: Tensor,
    experts: Sequence[int] | npt.NDArray[np.int32] | None,
    compute: Callable[[int, Tensor], Tensor],
) -> None:
    """Fill the slots of each expert with one pass over its rows.

    ``compute`` gives an expert's results of its rows: its number and (n, D) to (n, D).
    """
    for expert, filled in slots_of(routing, experts):
        index = torch.from_numpy(filled).to(normed.device)
        slots[index] = compute(expert, normed[index // routing.used])


def combined(
    slots: Tensor, routing: Routing, shared: Tensor | None, *, weighted: bool = True
) -> Tensor:
    """(R, D): slots times their weights, summed in float32, one k after another."""
    weights = torch.from_numpy(routing.weights).to(slots.device)
    weights = weights if weighted else torch.ones_like(weights)
    parts = slots.view(-1, routing.used, slots.shape[1])
    total = torch.zeros(parts.shape[0], slots.shape[1], device=slots.device)
    for k in range(routing.used):
        total += parts[:, k].float() * weights[:, k : k + 1]
    if shared is not None:
        total += shared.float()
    return total.to(slots.dtype)


def gated(gate_up: Tensor, spec: ExpertSpec | MlpSpec) -> Tensor:
    """The activation of stacked gate and up, (R, 2F) to (R, F); or of up alone, (R, F)."""
    if isinstance(spec, MlpSpec) and spec.activation == "xielu":
        positive, negative, beta, eps = spec.curve
        low = (torch.expm1(gate_up.clamp(max=eps)) - gate_up) * negative
        return torch.where(gate_up > 0, positive * gate_up.square(), low) + beta * gate_up
    if not spec.gated:
        return F.relu(gate_up).square()
    gate, up = gate_up.chunk(2, -1)
    if isinstance(spec, MlpSpec) and spec.gate_scale != 1.0:
        gate = gate * spec.gate_scale
    up = up.clamp(-spec.limit, spec.limit)
    if spec.activation == "swiglu":
        return F.silu(gate.clamp(max=spec.limit)) * up
    if spec.activation == "silu":
        return F.silu(gate).clamp(max=spec.limit) * up
    if spec.activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").clamp(max=spec.limit) * up
    assert isinstance(spec, ExpertSpec), "a dense MLP has no other activation"
    gate = gate.clamp(max=spec.limit)
    return gate * torch.sigmoid(gate * _GATE_SIGMOID) * (up + 1)


def _in_used_groups(rank: Tensor, spec: RouterSpec) -> Tensor:
    """Which experts (R, E) are in the best groups, by the sum of a group's largest."""
    grouped = rank.view(len(rank), spec.groups, -1)
    top = min(spec.group_top, grouped.shape[-1])
    totals = grouped.topk(top, dim=-1).values.sum(-1)  # (R, groups)
    best = totals.sort(dim=-1, descending=True, stable=True).indices[:, : spec.used_groups]
    allowed = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, best, True)
    return allowed[:, :, None].expand_as(grouped).reshape(rank.shape)
