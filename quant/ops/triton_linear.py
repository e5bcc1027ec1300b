"""Products of 1 to 64 rows with weights as they are stored: the kernels that decode lives on.

One kernel serves every number of rows. A program computes whole tiles of 16 weight rows. The steps
of 32 columns are dealt out to 16 chains, two for each of its warps; a chain unpacks its steps in
registers to exact bf16 codes, multiplies them with the activations on the tensor cores and adds the
group's scale times the product to float32 sums of its own; at the end the chains are added in a
written order.

So a row's result is bitwise the same for any number of rows up to 64: which chain adds what, and in
which order, follows from the columns alone, and the instruction (m16n8k16) computes its columns
apart. One row is padded to eight, which costs nothing beside reading the weights. (A GEMV on the
ordinary units would need as many instructions to turn codes into float32 numbers as this kernel
needs for everything, and its sums would not be those of the tensor cores.) For the same reason no
instruction that takes other sums may be chosen for some sizes only: batched dots keep Triton from
Hopper's ``wgmma``, and partial sums never meet by atomics.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localrt.quant.ops import triton_device
from localrt.quant.ops.triton_formats import TritonLayout
from localrt.quant.ops.triton_unpack import (
    E4M3,
    E8M0,
    Q4_K,
    Q6_K,
    e4m3,
    e8m0,
    half_scales,
    high_words,
    nibbles,
    ones_like,
    q4_k_scales,
    q6_k_scale,
    signed_bytes,
    tile_bytes,
    wide_words,
)

__all__ = ["GATES", "MOST_ROWS", "Tiles", "Tiling", "dense_linear", "tiled_linear", "tiling"]

MOST_ROWS = 64
"""For more rows it is quicker to unpack the weights once."""

GATES = {"silu": 1, "gelu_tanh": 2}

_WARPS = 8
_CHAINS = 16
# What small GPUs have, less what the kernel needs beside its buffers.
_SHARED_BYTES = 84 << 10
_COLUMNS_PER_STEP = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    """A matrix in tiles on the device: the same bytes under three types, and how to read them.

    ``factor`` (tiles,) multiplies the values of each tile; None is 1.
    """

    layout: TritonLayout
    shape: tuple[int, int]
    w8: Tensor
    w16: Tensor
    w32: Tensor
    factor: Tensor | None = None

    @property
    def count(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.shape[0] // 16)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How work is cut. Results do not depend on it."""

    tiles: int = 2  # of 16 weight rows, per program
    columns: int = 8  # rows of activations, padded
    unroll: int = 1
    stages: int = 3


def tiling(
    tiles: int, rows: int, processors: int, *, bits: int, head: int = 0, paired: bool = False
) -> Tiling:
    """For ``tiles`` tiles of weights, ``rows`` rows of activations and a GPU of ``processors``.

    ``bits`` per code and ``head`` bytes of scales say what a step loads; ``paired`` tiles cannot be
    computed apart.
    """
    columns = min(32, max(8, triton.next_power_of_2(rows)))
    # Two tiles share the activations that a warp loads and make its loads wider, but every
    # processor should have a program.
    pair = 2 if paired or 10 * tiles >= 18 * processors else 1
    # Memory is far: a small product must have most of its weights on the way at once. Stages less
    # one are buffered, and 5- and 6-bit steps load more than their weights.
    loads = 2 if bits in (5, 6) else 1
    buffer = _CHAINS * (pair * (64 * bits * loads + head) + 64 * columns)
    stages = min(5, 1 + _SHARED_BYTES // buffer)
    return Tiling(tiles=pair, columns=columns, stages=stages)


def tiled_linear(
    x: Tensor,
    weight: Tiles,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    cut: Tiling | None = None,
) -> None:
    """out (M, rows) = x (M, columns) times the weight's rows, M at most 64. x is bf16.

    With ``gate``, the weight stacks F gate rows and F up rows, F a multiple of 16, and out (M, F)
    is activation(gate) * up.
    """
    rows, columns = weight.shape
    layout = weight.layout
    if cut is None:
        cut = tiling(
            weight.count,
            x.shape[0],
            triton_device.processors(x.device),
            bits=layout.bits,
            head=layout.head,
            paired=gate is not None,
        )
    programs = weight.count // 2 if gate else -(-weight.count // cut.tiles)
    grid = (programs, -(-x.shape[0] // cut.columns))
    _tiled_kernel[grid](
        x,
        weight.w8,
        weight.w16,
        weight.w32,
        out,
        bias,
        weight.factor,
        x.shape[0],
        rows // 2 if gate else rows,
        columns // _COLUMNS_PER_STEP,
        weight.count,
        x.stride(0),
        out.stride(0),
        bits=layout.bits,
        codes=layout.codes,
        zero=layout.zero,
        scales=layout.scales,
        minimum=layout.minimum,
        halves=layout.halves,
        span_steps=layout.span_steps,
        head=layout.head,
        tiles=2 if gate else cut.tiles,
        columns=cut.columns,
        unroll=cut.unroll,
        stages=cut.stages,
        gate=GATES[gate] if gate else 0,
        compiled=triton_device.compiled(x),
        num_warps=_WARPS,
        num_stages=cut.stages,
        enable_fp_fusion=False,
    )


def dense_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    cut: Tiling | None = None,
) -> None:
    """out (M, rows) = x (M, columns) @ weight (rows, columns).T, all bf16, M at most 64.

    ``columns`` is a multiple of 32. cuBLAS would choose its order of sums by M.
    """
    rows, columns = weight.shape
    if cut is None:
        size = triton_device.processors(x.device)
        cut = tiling(-(-rows // 16), x.shape[0], size, bits=16, head=0)
    grid = (-(-rows // (16 * cut.tiles)), -(-x.shape[0] // cut.columns))
    _dense_kernel[grid](
        x,
        weight,
        out,
        bias,
        x.shape[0],
        rows,
        columns // _COLUMNS_PER_STEP,
        x.stride(0),
        out.stride(0),
        tiles=cut.tiles,
        columns=cut.columns,
        unroll=cut.unroll,
        compiled=triton_device.compiled(x),
        num_warps=_WARPS,
        num_stages=cut.stages,
        enable_fp_fusion=False,
    )


@triton.jit
def _folded(acc, rows: tl.constexpr, columns: tl.constexpr):
    """(16, rows, columns) to (rows, columns), added in a written order.

    ``tl.sum`` would leave the order to the compiler, which may choose it by the tensor's shape.
    """
    pairs = tl.permute(tl.reshape(acc, (2, 8, rows, columns)), (1, 2, 3, 0))
    low, high = tl.split(pairs)
    last = tl.permute(tl.reshape(low + high, (2, 2, 2, rows, columns)), (3, 4, 0, 1, 2))
    even, odd = tl.split(last)
    c04, c26 = tl.split(even)
    c15, c37 = tl.split(odd)
    c0, c4 = tl.split(c04)
    c2, c6 = tl.split(c26)
    c1, c5 = tl.split(c15)
    c3, c7 = tl.split(c37)
    return ((c0 + c1) + (c2 + c3)) + ((c4 + c5) + (c6 + c7))


@triton.jit
def _operand(data, tiles: tl.constexpr):
    """(16, tiles, 256) bytes of a step, or of half of an 8-bit one, to (16, tiles * 16, 16)."""
    quads = tl.permute(tl.reshape(data, (16, tiles, 4, 16, 4)), (0, 1, 3, 2, 4))
    return tl.reshape(quads, (16, tiles * 16, 16))


@triton.jit
def _activations(x, at, mask, compiled: tl.constexpr):
    """bf16 for the tensor cores; the interpreter multiplies float32."""
    found = tl.load(x + at, mask=mask, other=0.0)
    if not compiled:
        found = found.to(tl.float32)
    return found


@triton.jit
def _store(total, y, bias, first, rows, n, m, y_stride, gate: tl.constexpr, tiles: tl.constexpr):
    """The epilogue: bias or gate, rounding to y's type."""
    if gate:
        columns: tl.constexpr = total.shape[1]
        both = tl.permute(tl.reshape(total, (2, 16, columns)), (1, 2, 0))
        g, up = tl.split(both)
        if gate == 1:
            total = g * tl.sigmoid(g) * up
        else:  # 0.5 * (1 + tanh(z)) is sigmoid(2 z)
            total = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * up
        r = first * 16 + tl.arange(0, 16)
    else:
        r = first * 16 + tl.arange(0, tiles * 16)
    if bias is not None:
        total += tl.load(bias + r, mask=r < rows, other=0.0).to(tl.float32)[:, None]
    places = y + n[None, :] * y_stride + r[:, None]
    mask = (n < m)[None, :] & (r < rows)[:, None]
    tl.store(places, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _scales(
    w16,
    w32,
    at,  # (16, rows): where each row's span begins, in bytes
    at4,  # (16, rows / 4): the same for four rows, plus 4 * (row / 4)
    row,
    step,
    mask,
    mask4,
    half: tl.constexpr,
    rows: tl.constexpr,
    bits: tl.constexpr,
    scales: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
    span_steps: tl.constexpr,
):
    """Scale and offset (16, rows) of 16 or all 32 columns of each chain's step."""
    if scales == E8M0:
        scale = e8m0(tile_bytes(w32, at4, mask4, rows))
        offset = scale
    elif scales == E4M3:
        scale = e4m3(tile_bytes(w32, at4 + half * 16, mask4, rows))
        offset = scale
    elif scales == Q4_K:
        scale, offset = q4_k_scales(w16, w32, at, row, step % span_steps, mask)
    elif scales == Q6_K:
        fine_at = at4 + (32 + 16 * half) + step % span_steps * 32
        scale = q6_k_scale(w16, at, row, mask, tile_bytes(w32, fine_at, mask4, rows))
        offset = scale
    else:
        scale, offset = half_scales(w16, at, row, mask, half, bits, minimum, halves)
    return scale, offset


@triton.jit(do_not_specialize=["m"])
def _tiled_kernel(
    x,  # (m, columns) bf16
    w,  # the tiles, uint8
    w16,  # the same as float16
    w32,  # the same as int32
    y,  # (m, rows)
    bias,  # (rows,) or None
    factor,  # (tiles,) float32 or None
    m,
    rows,  # of y
    steps,  # columns / 32
    count,  # tiles
    x_stride,
    y_stride,
    bits: tl.constexpr,
    codes: tl.constexpr,
    zero: tl.constexpr,
    scales: tl.constexpr,
    minimum: tl.constexpr,
    halves: tl.constexpr,
    span_steps: tl.constexpr,
    head: tl.constexpr,
    tiles: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
    stages: tl.constexpr,
    gate: tl.constexpr,
    compiled: tl.constexpr,
):
    step_bytes: tl.constexpr = 64 * bits
    span_bytes: tl.constexpr = head + span_steps * step_bytes
    tile_bytes = steps // span_steps * span_bytes
    if gate:  # a tile of gate rows, and the tile of up rows that belongs to it
        first = tl.program_id(0)
        apart = count // 2
    else:
        first = tl.program_id(0) * tiles
        apart = 1
    base = first.to(tl.int64) * tile_bytes
    w += base
    w16 += base // 2
    w32 += base // 4

    chain = tl.arange(0, 16)
    tile = tl.arange(0, tiles)
    inner = tl.arange(0, 256)
    r = tl.arange(0, tiles * 16)
    k = tl.arange(0, 16)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    tile_live = (first + tile * apart < count)[None, :, None]
    row_live = first + r // 16 * apart < count
    data_at = (tile * (apart * tile_bytes))[None, :, None] + inner[None, None, :]
    r4 = tl.arange(0, tiles * 4)
    head_at = (r // 16 * (apart * tile_bytes))[None, :]
    head4_at = (r4 // 4 * (apart * tile_bytes) + r4 % 4 * 4)[None, :]
    row = (r % 16)[None, :]
    x_at = n[None, None, :] * x_stride + k[None, :, None]
    x_live = (n < m)[None, None, :]

    acc = tl.full((16, tiles * 16, columns), 0.0, tl.float32)
    for start in tl.range(0, steps, 16 * unroll, num_stages=stages):
        for part in tl.static_range(unroll):
            step = start + part * 16 + chain
            live = step < steps
            span_at = step // span_steps * span_bytes
            at = span_at + head + step % span_steps * step_bytes
            xs_at = x_at + (step * 32)[:, None, None]
            xs_live = live[:, None, None] & x_live
            x0 = _activations(x, xs_at, xs_live, compiled)
            x1 = _activations(x, xs_at + 16, xs_live, compiled)
            places = w + data_at + at[:, None, None]
            data_live = live[:, None, None] & tile_live
            scale_live = live[:, None] & row_live[None, :]
            if bits == 8:
                data = tl.load(places, mask=data_live, other=0)
                a0 = signed_bytes(_operand(data, tiles), compiled)
                upper = tl.load(places + 256, mask=data_live, other=0)
                a1 = signed_bytes(_operand(upper, tiles), compiled)
            elif bits == 4:
                data = tl.load(places, mask=data_live, other=0)
                a0, a1 = nibbles(_operand(data, tiles), codes, zero, compiled)
            else:
                at3 = head_at[:, :, None] + at[:, None, None]
                row3 = row[:, :, None]
                live3 = scale_live[:, :, None]
                v = tl.arange(0, 4)[None, None, :]
                words = tl.load(w32 + at3 // 4 + 16 * v + row3, mask=live3, other=0)
                h0 = high_words(w32, at3, row3, v, 0, bits, live3)
                h1 = high_words(w32, at3, row3, v, 1, bits, live3)
                a0 = wide_words(words, h0, zero, compiled)
                a1 = wide_words(words >> 4, h1, zero, compiled)
                a0 = tl.reshape(a0, (16, tiles * 16, 16))
                a1 = tl.reshape(a1, (16, tiles * 16, 16))
            heads = head_at + span_at[:, None]
            heads4 = head4_at + span_at[:, None]
            live4 = live[:, None] & (first + r4 // 4 * apart < count)[None, :]
            scale, offset = _scales(
                w16, w32, heads, heads4, row, step[:, None], scale_live, live4,
                0, tiles * 16, bits, scales, minimum, halves, span_steps,
            )  # fmt: skip
            product = tl.dot(a0, x0)
            if minimum:
                ones = ones_like(a0, compiled)
            if halves:
                acc = tl.fma(product, scale[:, :, None], acc)
                if minimum:
                    acc = tl.fma(tl.dot(ones, x0), offset[:, :, None], acc)
                scale, offset = _scales(
                    w16, w32, heads, heads4, row, step[:, None], scale_live, live4,
                    1, tiles * 16, bits, scales, minimum, halves, span_steps,
                )  # fmt: skip
                acc = tl.fma(tl.dot(a1, x1), scale[:, :, None], acc)
                if minimum:
                    acc = tl.fma(tl.dot(ones, x1), offset[:, :, None], acc)
            else:
                acc = tl.fma(tl.dot(a1, x1, product), scale[:, :, None], acc)
                if minimum:
                    sums = tl.dot(ones, x1, tl.dot(ones, x0))
                    acc = tl.fma(sums, offset[:, :, None], acc)

    total = _folded(acc, tiles * 16, columns)
    if factor is not None:
        of_tile = factor + first + r // 16 * apart
        total *= tl.load(of_tile, mask=row_live, other=0.0)[:, None]
    _store(total, y, bias, first, rows, n, m, y_stride, gate, tiles)


@triton.jit(do_not_specialize=["m"])
def _dense_kernel(
    x,  # (m, columns) bf16
    w,  # (rows, columns) bf16
    y,  # (m, rows)
    bias,  # (rows,) or None
    m,
    rows,
    steps,  # columns / 32
    x_stride,
    y_stride,
    tiles: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
    compiled: tl.constexpr,
):
    first = tl.program_id(0) * tiles
    w += first.to(tl.int64) * 16 * (steps * 32)
    chain = tl.arange(0, 16)
    r = tl.arange(0, tiles * 16)
    k = tl.arange(0, 16)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    row_live = (first * 16 + r < rows)[None, :, None]
    w_at = r[None, :, None] * (steps * 32) + k[None, None, :]
    x_at = n[None, None, :] * x_stride + k[None, :, None]
    x_live = (n < m)[None, None, :]
    acc = tl.full((16, tiles * 16, columns), 0.0, tl.float32)
    for start in range(0, steps, 16 * unroll):
        for part in tl.static_range(unroll):
            step = start + part * 16 + chain
            live = (step < steps)[:, None, None]
            column = (step * 32)[:, None, None]
            x0 = _activations(x, x_at + column, live & x_live, compiled)
            x1 = _activations(x, x_at + column + 16, live & x_live, compiled)
            a0 = _activations(w, w_at + column, live & row_live, compiled)
            a1 = _activations(w, w_at + column + 16, live & row_live, compiled)
            acc = tl.dot(a1, x1, tl.dot(a0, x0, acc))
    total = _folded(acc, tiles * 16, columns)
    _store(total, y, bias, first, rows, n, m, y_stride, 0, tiles)
