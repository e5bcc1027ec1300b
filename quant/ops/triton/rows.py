"""Chosen rows of a tiled matrix as numbers: an embedding's rows, or all rows for a large product.

Values are scale * code + offset in float32, rounded once; NF4's levels are those of bf16, as in
``linear.py``. It knows tiles and row numbers.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localrt.quant.ops.triton import device as triton_device
from localrt.quant.ops.triton.linear import Tiles
from localrt.quant.ops.triton.unpack import (
    E4M3,
    E8M0,
    Q4_K,
    Q6_K,
    e4m3,
    e8m0,
    half_scales,
    high_words,
    nibbles,
    q4_k_scales,
    q6_k_scale,
    row_bytes,
    signed_bytes,
    wide_words,
)

__all__ = ["unpack_rows"]


def unpack_rows(
    weight: Tiles,
    out: Tensor,
    *,
    first: int = 0,
    index: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """out (n, columns), contiguous, bf16 or float32: rows from ``first`` on, or those of ``index``.

    ``index`` (n,) is int64 on the device. ``factor`` multiplies every value.
    """
    columns = weight.shape[1]
    layout = weight.layout
    block_rows = 16 if index is None else 1
    block_steps = 4 if index is None else 32
    grid = (-(-out.shape[0] // block_rows), -(-columns // (32 * block_steps)))
    _rows_kernel[grid](
        weight.w8,
        weight.w16,
        weight.w32,
        weight.factor,
        index,
        out,
        out.shape[0],
        first,
        columns // 32,
        factor,
        bits=layout.bits,
        codes=layout.codes,
        zero=layout.zero,
        scales=layout.scales,
        minimum=layout.minimum,
        halves=layout.halves,
        span_steps=layout.span_steps,
        head=layout.head,
        block_rows=block_rows,
        block_steps=block_steps,
        compiled=triton_device.compiled(out),
        num_warps=4,
        enable_fp_fusion=False,  # two roundings, as the reference has
    )


@triton.jit
def _scales(
    w,
    w16,
    w32,
    at,  # where the span begins, in bytes
    row,
    step,
    mask,
    half: tl.constexpr,
    bits: tl.constexpr,
    scales: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
    span_steps: tl.constexpr,
):
    """Scale and offset of 16 or all 32 columns of a step; everything broadcasts."""
    if scales == E8M0:
        scale = e8m0(row_bytes(w, at, row, mask))
        offset = scale
    elif scales == E4M3:
        scale = e4m3(row_bytes(w, at + half * 16, row, mask))
        offset = scale
    elif scales == Q4_K:
        scale, offset = q4_k_scales(w16, w32, at, row, step % span_steps, mask)
    elif scales == Q6_K:
        fine = row_bytes(w, at + (32 + 16 * half) + step % span_steps * 32, row, mask)
        scale = q6_k_scale(w16, at, row, mask, fine)
        offset = scale
    else:
        scale, offset = half_scales(w16, at, row, mask, half, bits, minimum, halves)
    return scale, offset


@triton.jit(do_not_specialize=["count", "first"])
def _rows_kernel(
    w,
    w16,
    w32,
    factors,  # (tiles,) or None
    index,  # (count,) or None
    out,  # (count, columns)
    count,
    first,
    steps,
    factor,
    bits: tl.constexpr,
    codes: tl.constexpr,
    zero: tl.constexpr,
    scales: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
    span_steps: tl.constexpr,
    head: tl.constexpr,
    block_rows: tl.constexpr,
    block_steps: tl.constexpr,
    compiled: tl.constexpr,
):
    step_bytes: tl.constexpr = 64 * bits
    span_bytes: tl.constexpr = head + span_steps * step_bytes
    tile_bytes = (steps // span_steps * span_bytes).to(tl.int64)
    n = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    step = tl.program_id(1) * block_steps + tl.arange(0, block_steps)
    live = (n < count)[:, None] & (step < steps)[None, :]  # (rows, steps)
    live3 = live[:, :, None]
    if index is not None:
        number = tl.load(index + n, mask=n < count, other=0)
    else:
        number = (first + n).to(tl.int64)
    tile = number // 16
    row = number % 16
    span_at = tile[:, None] * tile_bytes + (step // span_steps * span_bytes)[None, :]
    at = span_at + (head + step % span_steps * step_bytes)[None, :]
    row2 = row[:, None]
    row3 = row[:, None, None]
    if bits == 4 or bits == 8:
        k = tl.arange(0, 16)[None, None, :]
        places = w + at[:, :, None] + row3 * 4 + k // 4 * 64 + k % 4
        data = tl.load(places, mask=live3, other=0)
        if bits == 4:
            low, high = nibbles(data, codes, zero, compiled)
        else:
            low = signed_bytes(data, compiled)
            high = signed_bytes(tl.load(places + 256, mask=live3, other=0), compiled)
    else:
        v = tl.arange(0, 4)[None, None, :]
        at3 = at[:, :, None]
        words = tl.load(w32 + at3 // 4 + 16 * v + row3, mask=live3, other=0)
        low = wide_words(words, high_words(w32, at3, row3, v, 0, bits, live3), zero, compiled)
        high = wide_words(words >> 4, high_words(w32, at3, row3, v, 1, bits, live3), zero, compiled)
        low = tl.reshape(low, (block_rows, block_steps, 16))
        high = tl.reshape(high, (block_rows, block_steps, 16))
    scale, offset = _scales(
        w, w16, w32, span_at, row2, step[None, :], live,
        0, bits, scales, minimum, halves, span_steps,
    )  # fmt: skip
    scale1 = scale
    offset1 = offset
    if halves:
        scale1, offset1 = _scales(
            w, w16, w32, span_at, row2, step[None, :], live,
            1, bits, scales, minimum, halves, span_steps,
        )  # fmt: skip
    low = low.to(tl.float32) * scale[:, :, None]
    high = high.to(tl.float32) * scale1[:, :, None]
    if minimum:
        low += offset[:, :, None]
        high += offset1[:, :, None]
    if factors is not None:
        of_tile = tl.load(factors + tile, mask=n < count, other=0.0)[:, None, None]
        low *= of_tile
        high *= of_tile
    k = tl.arange(0, 16)[None, None, :]
    places = out + n.to(tl.int64)[:, None, None] * (steps * 32) + step[None, :, None] * 32 + k
    tl.store(places, (low * factor).to(out.dtype.element_ty), mask=live3)
    tl.store(places + 16, (high * factor).to(out.dtype.element_ty), mask=live3)
