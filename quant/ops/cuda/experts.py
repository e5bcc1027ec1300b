"""The steps of a mixture of experts on a card: the router's choice, experts of a kind at once.

The card chooses, and its kernels find by themselves which rows an expert sees: they are started
before the host knows. All experts of a kind are two launches (``kernels/grouped.py``). Others are
products of their own, as a dense MLP has them, and the host has to wait for the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.ops.cuda.expert_table import CudaExpertTable, ExpertKind
from localrt.quant.ops.cuda.kernels.grouped import (
    MOST_EXPERTS,
    Plan,
    grouped_down,
    grouped_gate_up,
    plan_slots,
)
from localrt.quant.ops.cuda.kernels.products import quantize
from localrt.quant.ops.cuda.kernels.routing import choose, router_logits
from localrt.quant.ops.cuda.kernels.steps import rotate_blocks
from localrt.quant.ops.cuda.products import linear
from localrt.quant.ops.cuda.routing import CudaRouting, on_card
from localrt.quant.ops.experts import ExpertSpec, RouterSpec, RouterWeights, Routing
from localrt.quant.ops.torch.experts import route, run_each


def route_rows(
    normed: Tensor,
    rows: Tensor,
    weights: RouterWeights,
    spec: RouterSpec,
) -> Routing:
    """The experts of normed rows (R, D), float32; ``rows`` are the same in bf16."""
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
    if spec.count > MOST_EXPERTS:
        biased = logits if weights.gate_bias is None else logits + weights.gate_bias
        return route(biased, weights.choice_bias, spec)
    results = choose(logits, weights.gate_bias, weights.choice_bias, spec)
    return CudaRouting(results, len(logits), spec.ranked, spec.used)


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
    kinds = table.kind_of
    wanted = np.ones(len(kinds), np.bool_)
    if experts is not None:
        asked = np.asarray(experts, np.intp)
        wanted[:] = False
        wanted[asked[asked < len(kinds)]] = True
    if (others := wanted & (kinds < 0)).any():
        run_each(normed, routing, slots, others.nonzero()[0].tolist(), apart)
    chosen: Tensor | None = None
    for number, kind in enumerate(table.kinds):
        if not (same := wanted & (kinds == number)).any():
            continue
        if chosen is None:
            chosen = on_card(routing, normed.device).chosen_there
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
