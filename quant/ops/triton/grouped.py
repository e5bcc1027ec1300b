"""All experts of a layer in two launches: gate and up with their activation, then down.

A program computes whole tiles of one expert for a block of the rows that chose it. Experts lie
anywhere: a ``Plan`` has the addresses of each block's matrices, and where its rows are. Passes of
up to 64 rows use the sums of ``linear.py``, so that a row's result is bitwise that of any
other pass; longer ones unpack tiles to bf16 for a block of rows at a time, as wide products need.

It knows addresses and rows; which expert they are of, and who routed, is its caller's business.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from localrt.quant.ops.triton import device as triton_device
from localrt.quant.ops.triton.chains import (
    GATES,
    activations,
    chain_sums,
    step_codes,
    step_scales,
    store,
)
from localrt.quant.ops.triton.formats import TritonLayout
from localrt.quant.ops.triton.linear import tiling

__all__ = ["ADDRESSES", "Plan", "Side", "grouped_down", "grouped_gate_up", "plan_blocks"]

Integers: TypeAlias = npt.NDArray[np.int64]

# A block's numbers in a plan; slots come behind all blocks.
_GATE, _UP, _DOWN, _FACTORS, _DOWN_FACTOR, _IN_BIAS, _OUT_BIAS, _FIRST, _COUNT, _SLOTS = (
    tl.constexpr(n) for n in (0, 1, 2, 3, 5, 6, 7, 8, 9, 10)
)
ADDRESSES = 8
"""Of a block: gate, up, down; their factors for each tile; biases of gate and up, and of down."""

_LONG_TILES = 4  # tiles of a program in long passes
_LONG_STEPS = 4  # steps of 32 columns at once


@dataclass(frozen=True, slots=True)
class Side:
    """Gate and up, or down, of experts that one launch computes: they differ in addresses alone."""

    layout: TritonLayout
    rows: int  # of one matrix
    columns: int
    scaled: bool  # each tile has a factor
    biased: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Blocks of one pass, on the device: (fields, blocks) int64, then the slots in their order.

    Slot s is choice s % used of row s // used. A block's rows are ``count`` consecutive slots from
    ``first`` on, all of one expert, at most ``columns``. ``long`` passes unpack tiles.
    """

    data: Tensor
    blocks: int
    slots: int
    used: int
    columns: int
    long: bool


def plan_blocks(
    places: Integers,
    counts: Integers,
    slots: Integers,
    used: int,
    device: torch.device,
    *,
    long: bool,
) -> Plan:
    """A pass over experts at ``places`` (n, ADDRESSES), each seen by ``counts`` (n,) of ``slots``.

    Slots are sorted by expert. Everything is host memory; one copy brings it to the device.
    """
    most = int(counts.max())
    least, widest = (32, 64) if long else (8, 32)
    columns = min(widest, max(least, triton.next_power_of_2(most)))
    firsts = np.cumsum(counts) - counts
    if most > columns:  # experts of several blocks
        cuts = -(-counts // columns)
        which = np.repeat(np.arange(len(counts)), cuts)
        skipped = (np.arange(len(which)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * columns
        places, firsts = places[which], firsts[which] + skipped
        counts = np.minimum(counts[which] - skipped, columns)
    blocks = len(counts)
    numbers = np.empty((ADDRESSES + 2) * blocks + len(slots), np.int64)
    fields = numbers[: (ADDRESSES + 2) * blocks].reshape(ADDRESSES + 2, blocks)
    fields[:ADDRESSES] = places.T
    fields[ADDRESSES], fields[ADDRESSES + 1] = firsts, counts
    numbers[fields.size :] = slots
    data = triton_device.upload(numbers, device)
    return Plan(data, blocks, len(slots), used, columns, long)


def grouped_gate_up(x: Tensor, plan: Plan, side: Side, activation: str, limit: float) -> Tensor:
    """activation(gate) * up of rows of x (R, D), bf16: (slots, F) bf16, in the plan's order."""
    out = torch.empty(plan.slots, side.rows, dtype=torch.bfloat16, device=x.device)
    _launch(x, out, plan, side, GATES[activation], limit)
    return out


def grouped_down(inner: Tensor, out: Tensor, plan: Plan, side: Side) -> None:
    """Down of each of ``inner`` (slots, F), bf16, to its slot of out (R * K, D)."""
    _launch(inner, out, plan, side, 0, 0.0)


def _launch(x: Tensor, y: Tensor, plan: Plan, side: Side, gate: int, limit: float) -> None:
    layout = side.layout
    count = -(-side.rows // 16)
    common = {
        "bits": layout.bits,
        "codes": layout.codes,
        "zero": layout.zero,
        "scales": layout.scales,
        "minimum": layout.minimum,
        "halves": layout.halves,
        "span_steps": layout.span_steps,
        "head": layout.head,
        "columns": plan.columns,
        "gate": gate,
        "scaled": side.scaled,
        "biased": side.biased,
        "compiled": triton_device.compiled(x),
        "enable_fp_fusion": False,
    }
    numbers = (
        x, y, plan.data, plan.blocks, plan.used, side.rows, side.columns // 32, count,
        x.stride(0), y.stride(0), limit,
    )  # fmt: skip
    if plan.long:
        programs = -(-count // (_LONG_TILES // 2 if gate else _LONG_TILES))
        _long_kernel[(programs, plan.blocks)](
            *numbers, **common, tiles=_LONG_TILES, at_once=_LONG_STEPS, num_warps=4, num_stages=3
        )
        return
    cut = tiling(
        (2 if gate else 1) * count * plan.blocks,
        plan.columns,
        triton_device.processors(x.device),
        bits=layout.bits,
        head=layout.head,
        paired=gate > 0,
    )
    programs = count if gate else -(-count // cut.tiles)
    _grouped_kernel[(programs, plan.blocks)](
        *numbers,
        **common,
        tiles=2 if gate else cut.tiles,
        stages=cut.stages,
        num_warps=8,
        num_stages=cut.stages,
    )


@triton.jit
def _matrix(plan, blocks, tile_bytes, first, gate: tl.constexpr):
    """Where a program's first tile lies, and the bytes from there to the up matrix's."""
    b = tl.program_id(1)
    if gate:
        here = tl.load(plan + _GATE * blocks + b)
        apart = tl.multiple_of(tl.load(plan + _UP * blocks + b) - here, 16)
    else:
        here = tl.load(plan + _DOWN * blocks + b)
        apart = tile_bytes
    return tl.multiple_of(here + first.to(tl.int64) * tile_bytes, 16), apart


@triton.jit
def _rows_of(plan, blocks, used, gate: tl.constexpr, columns: tl.constexpr):
    """Which rows of x a block reads, which rows of y it writes, and which of these there are."""
    b = tl.program_id(1)
    first = tl.load(plan + _FIRST * blocks + b)
    n = tl.arange(0, columns)
    live = n < tl.load(plan + _COUNT * blocks + b)
    slot = tl.load(plan + _SLOTS * blocks + first + n, mask=live, other=0)
    if gate:
        source = slot // used
        target = first + n
    else:
        source = first + n
        target = slot
    return source, target, live


@triton.jit
def _factors(plan, blocks, first, count, gate: tl.constexpr, tiles: tl.constexpr):
    """The factor of every row of a program's tiles, (tiles * 16,)."""
    b = tl.program_id(1)
    t = tl.arange(0, tiles * 16) // 16
    if gate:
        half: tl.constexpr = tiles // 2
        of_gate = tl.load(plan + _FACTORS * blocks + b)
        of_up = tl.load(plan + (_FACTORS + 1) * blocks + b)
        at = tl.where(t < half, of_gate, of_up)
        t = t % half
    else:
        at = tl.load(plan + _DOWN_FACTOR * blocks + b)
    places = (at + (first + t) * 4).to(tl.pointer_type(tl.float32))
    return tl.load(places, mask=first + t < count, other=0.0)


@triton.jit
def _bias(plan, blocks, gate: tl.constexpr, biased: tl.constexpr):
    """Where a block's bias begins; None without one."""
    bias = None
    if biased:
        field: tl.constexpr = _IN_BIAS if gate else _OUT_BIAS
        address = tl.load(plan + field * blocks + tl.program_id(1))
        bias = address.to(tl.pointer_type(tl.float32))
    return bias


@triton.jit(do_not_specialize=["blocks", "used"])
def _grouped_kernel(
    x,
    y,
    plan,
    blocks,
    used,
    rows,  # of y
    steps,  # columns / 32
    count,  # tiles of a matrix
    x_stride,
    y_stride,
    limit,
    bits: tl.constexpr,
    codes: tl.constexpr,
    zero: tl.constexpr,
    scales: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
    span_steps: tl.constexpr,
    head: tl.constexpr,
    columns: tl.constexpr,
    gate: tl.constexpr,
    scaled: tl.constexpr,
    biased: tl.constexpr,
    compiled: tl.constexpr,
    tiles: tl.constexpr,
    stages: tl.constexpr,
):
    first = tl.program_id(0) * (1 if gate else tiles)
    tile_bytes = steps // span_steps * (head + span_steps * (64 * bits))
    address, apart = _matrix(plan, blocks, tile_bytes, first, gate)
    source, target, live = _rows_of(plan, blocks, used, gate, columns)
    w = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    w16 = tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16)
    w32 = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    total = chain_sums(
        x, w, w16, w32, source * x_stride, live, tile_bytes, apart, count - first, steps,
        bits, codes, zero, scales, minimum, halves, span_steps, head,
        tiles, 1 if gate else tiles, columns, 1, stages, compiled,
    )  # fmt: skip
    if scaled:
        total *= _factors(plan, blocks, first, count, gate, tiles)[:, None]
    bias = _bias(plan, blocks, gate, biased)
    store(total, y, target * y_stride, live, bias, first * 16, rows, limit, gate)


@triton.jit(do_not_specialize=["blocks", "used"])
def _long_kernel(
    x,
    y,
    plan,
    blocks,
    used,
    rows,
    steps,
    count,
    x_stride,
    y_stride,
    limit,
    bits: tl.constexpr,
    codes: tl.constexpr,
    zero: tl.constexpr,
    scales: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
    span_steps: tl.constexpr,
    head: tl.constexpr,
    columns: tl.constexpr,
    gate: tl.constexpr,
    scaled: tl.constexpr,
    biased: tl.constexpr,
    compiled: tl.constexpr,
    tiles: tl.constexpr,
    at_once: tl.constexpr,
):
    own: tl.constexpr = tiles // 2 if gate else tiles  # tiles of one matrix
    first = tl.program_id(0) * own
    span_bytes: tl.constexpr = head + span_steps * (64 * bits)
    tile_bytes = steps // span_steps * span_bytes
    address, apart = _matrix(plan, blocks, tile_bytes, first, gate)
    source, target, live_rows = _rows_of(plan, blocks, used, gate, columns)
    w = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    w16 = tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16)
    w32 = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    k = tl.arange(0, at_once * 16)
    x_at = (k // 16 * 32 + k % 16)[:, None] + (source * x_stride)[None, :]
    acc = tl.full((tiles * 16, columns), 0.0, tl.float32)
    for start in range(0, steps, at_once):
        step = start + tl.arange(0, at_once)
        live = step < steps
        span_at = step // span_steps * span_bytes
        at = span_at + head + step % span_steps * (64 * bits)
        x_live = (start + k // 16 < steps)[:, None] & live_rows[None, :]
        x0 = activations(x, x_at + start * 32, x_live, compiled)
        x1 = activations(x, x_at + start * 32 + 16, x_live, compiled)
        a0, a1 = step_codes(
            w, w32, at, live, tile_bytes, apart, count - first,
            at_once, tiles, own, bits, codes, zero, compiled,
        )  # fmt: skip
        scale, offset = step_scales(
            w16, w32, span_at, step, live, tile_bytes, apart, count - first,
            0, tiles, own, bits, scales, minimum, halves, span_steps,
        )  # fmt: skip
        acc = tl.dot(_weights(a0, scale, offset, minimum, compiled), x0, acc)
        if halves:
            scale, offset = step_scales(
                w16, w32, span_at, step, live, tile_bytes, apart, count - first,
                1, tiles, own, bits, scales, minimum, halves, span_steps,
            )  # fmt: skip
        acc = tl.dot(_weights(a1, scale, offset, minimum, compiled), x1, acc)
    if scaled:
        acc *= _factors(plan, blocks, first, count, gate, tiles)[:, None]
    bias = _bias(plan, blocks, gate, biased)
    store(acc, y, target * y_stride, live_rows, bias, first * 16, rows, limit, gate)


@triton.jit
def _weights(codes, scale, offset, minimum: tl.constexpr, compiled: tl.constexpr):
    """Codes (steps, rows, 16) to bf16 weights (rows, steps * 16)."""
    count: tl.constexpr = codes.shape[0]
    rows: tl.constexpr = codes.shape[1]
    values = codes.to(tl.float32) * scale[:, :, None]
    if minimum:
        values += offset[:, :, None]
    found = tl.reshape(tl.permute(values.to(tl.bfloat16), (1, 0, 2)), (rows, count * 16))
    if not compiled:
        found = found.to(tl.float32)
    return found
