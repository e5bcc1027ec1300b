"""The steps of a mixture of experts on a card: routing on the host, experts of a kind at once.

Routing is decided on the host, since it says which weights are needed: a pass of a mixture waits
for its router in every layer, and is not recorded as a CUDA graph. All experts of a kind are two
launches (``kernels/grouped.py``); others are products of their own, as a dense MLP has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.ops.cuda.device import upload
from localrt.quant.ops.cuda.expert_table import CudaExpertTable, ExpertKind
from localrt.quant.ops.cuda.kernels.grouped import Plan, grouped_down, grouped_gate_up, plan_slots
from localrt.quant.ops.cuda.kernels.products import MOST_ROWS, quantize
from localrt.quant.ops.cuda.kernels.steps import rotate_blocks, router_logits
from localrt.quant.ops.experts import ExpertSpec, RouterSpec, RouterWeights, Routing
from localrt.quant.ops.torch.experts import route, run_each

__all__ = ["route_rows", "run_kind", "run_kinds"]


def route_rows(
    normed: Tensor,
    rows: Tensor,
    weights: RouterWeights,
    spec: RouterSpec,
    linear: Callable[..., Tensor],
) -> Routing:
    """The experts of normed rows (R, D), float32; ``rows`` are the same in bf16.

    ``linear`` is the product of a router that is packed, or rotated.
    """
    gate: Any = weights.gate
    if gate.hadamard or not all(isinstance(part, Tensor) for part in gate.parts):
        logits = linear(rows, gate, dtype=torch.float32)
    else:
        shape = (len(normed), gate.shape[0])
        logits = torch.empty(shape, dtype=torch.float32, device=normed.device)
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
    return route(logits, bias, spec)


def run_kinds(
    normed: Tensor,
    routing: Routing,
    table: CudaExpertTable,
    spec: ExpertSpec,
    slots: Tensor,
    experts: Sequence[int] | npt.NDArray[np.int32] | None,
    apart: Callable[[int, Tensor], Tensor],
) -> None:
    """Fill slots: experts of a kind together, whoever else was asked for.

    ``apart`` computes the rows of an expert of no kind. How a row is computed follows from its
    expert, and there from how many rows the pass has.
    """
    wanted = np.zeros(len(table.kind_of), np.bool_)
    wanted[routing.chosen] = True
    if experts is not None:
        wanted &= np.isin(np.arange(len(wanted)), np.asarray(experts))
    kinds = table.kind_of
    if (others := wanted & (kinds < 0)).any():
        run_each(normed, routing, slots, others.nonzero()[0].tolist(), apart)
    chosen: Tensor | None = None
    for number, kind in enumerate(table.kinds):
        if not (same := wanted & (kinds == number)).any():
            continue
        if chosen is None:
            chosen = upload(routing.chosen, normed.device)
        entries = table.entries(normed.device)
        run_kind(normed, plan_slots(chosen, same), entries, kind, spec, slots)


def run_kind(
    normed: Tensor, plan: Plan, entries: Tensor, kind: ExpertKind, spec: ExpertSpec, slots: Tensor
) -> None:
    """Two products, and the rotations that the weights ask for."""
    outer, within = kind.rotated
    x = quantize(rotate_blocks(normed, outer) if outer else normed, fine=kind.fine)
    inner = grouped_gate_up(x, plan, entries, kind.gate_up, spec.activation, spec.limit)
    if within:
        inner = rotate_blocks(inner, within)
    grouped_down(quantize(inner, fine=kind.fine), slots, plan, entries, kind.down)
