"""The small steps of a mixture on a card: router logits in float32, and the sum of the slots.

Both add in a fixed order: a row's result does not depend on the others. They know numbers, not
which experts these are of.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combined", "router_logits"]

_EXPERTS = 16  # of one program
_COLUMNS = 256  # at once


def router_logits(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """out (R, E) = x (R, D), float32, times the rows of gate (E, D), bf16 or float32."""
    rows, width = x.shape
    experts = gate.shape[0]
    _router_kernel[(rows, -(-experts // _EXPERTS))](
        x,
        gate,
        out,
        experts,
        width,
        out.stride(0),
        block=_EXPERTS,
        columns=_COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def combined(slots: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    """Slots (R * K, D) times weights (R, K), summed in the order of k, plus shared (R, D)."""
    rows, used = weights.shape
    width = slots.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=slots.device)
    block = 1024
    _combine_kernel[(rows, -(-width // block))](
        slots, weights, shared, out, used, width, block=block, num_warps=4, enable_fp_fusion=False
    )
    return out


@triton.jit
def _router_kernel(
    x, gate, out, experts, width, stride, block: tl.constexpr, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * block + tl.arange(0, block)
    live = e < experts
    acc = tl.full((block, columns), 0.0, tl.float32)
    for start in range(0, width, columns):
        i = start + tl.arange(0, columns)
        here = i < width
        value = tl.load(x + row * width + i, mask=here, other=0.0)
        at = e[:, None] * width + i[None, :]
        w = tl.load(gate + at, mask=live[:, None] & here[None, :], other=0.0).to(tl.float32)
        acc = tl.fma(w, tl.broadcast_to(value[None, :], (block, columns)), acc)
    tl.store(out + row * stride + e, tl.sum(acc, 1), mask=live)


@triton.jit(do_not_specialize=["used"])
def _combine_kernel(slots, weights, shared, out, used, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    mask = i < width
    total = tl.full((block,), 0.0, tl.float32)
    for k in range(0, used):
        slot = row * used + k
        total += tl.load(slots + slot * width + i, mask=mask, other=0.0) * tl.load(weights + slot)
    if shared is not None:
        total += tl.load(shared + row * width + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, total, mask=mask)
