"""Products of 1 to 64 rows with weights as they are stored: the kernels that decode lives on.

One kernel serves every number of rows. A program computes whole tiles of 16 weight rows; the steps
of 32 columns are dealt out to 16 chains, two for each of its warps (``chains.py``).

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

from localrt.quant.ops.triton import device as triton_device
from localrt.quant.ops.triton.chains import GATES, activations, chain_sums, folded, store
from localrt.quant.ops.triton.formats import TritonLayout

__all__ = ["MOST_ROWS", "Tiles", "Tiling", "dense_linear", "tiled_linear", "tiling"]

MOST_ROWS = 64
"""For more rows it is quicker to unpack the weights once."""

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
    limit: float = 0.0,
    cut: Tiling | None = None,
) -> None:
    """out (M, rows) = x (M, columns) times the weight's rows, M at most 64. x is bf16.

    With ``gate``, the weight stacks F gate rows and F up rows, F a multiple of 16, and out (M, F)
    is activation(gate) * up; ``limit`` is ``swiglu_oai``'s. With x (H, M, columns) the weight
    stacks H matrices of whole tiles, and out is (H, M, rows / H).
    """
    heads = x.shape[0] if x.dim() == 3 else 1
    rows, columns = weight.shape[0] // heads, weight.shape[1]
    layout = weight.layout
    count = weight.count // heads
    if cut is None:
        cut = tiling(
            weight.count,
            x.shape[-2],
            triton_device.processors(x.device),
            bits=layout.bits,
            head=layout.head,
            paired=gate is not None,
        )
    programs = count // 2 if gate else -(-count // cut.tiles)
    grid = (programs, -(-x.shape[-2] // cut.columns), heads)
    _tiled_kernel[grid](
        x,
        weight.w8,
        weight.w16,
        weight.w32,
        out,
        bias,
        weight.factor,
        x.shape[-2],
        rows // 2 if gate else rows,
        columns // _COLUMNS_PER_STEP,
        count,
        x.stride(-2),
        out.stride(-2),
        x.stride(0) if heads > 1 else 0,
        out.stride(0) if heads > 1 else 0,
        limit,
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

    ``columns`` is a multiple of 32; x and out may have heads as in ``tiled_linear``. cuBLAS would
    choose its order of sums by M.
    """
    heads = x.shape[0] if x.dim() == 3 else 1
    rows, columns = weight.shape[0] // heads, weight.shape[1]
    if cut is None:
        size = triton_device.processors(x.device)
        cut = tiling(-(-rows // 16) * heads, x.shape[-2], size, bits=16, head=0)
    grid = (-(-rows // (16 * cut.tiles)), -(-x.shape[-2] // cut.columns), heads)
    _dense_kernel[grid](
        x,
        weight,
        out,
        bias,
        x.shape[-2],
        rows,
        columns // _COLUMNS_PER_STEP,
        x.stride(-2),
        out.stride(-2),
        x.stride(0) if heads > 1 else 0,
        out.stride(0) if heads > 1 else 0,
        tiles=cut.tiles,
        columns=cut.columns,
        unroll=cut.unroll,
        compiled=triton_device.compiled(x),
        num_warps=_WARPS,
        num_stages=cut.stages,
        enable_fp_fusion=False,
    )


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
    count,  # tiles of a head
    x_stride,
    y_stride,
    x_head_stride,
    y_head_stride,
    limit,
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
    which = tl.program_id(2).to(tl.int64)
    if gate:  # a tile of gate rows, and the tile of up rows that belongs to it
        first = tl.program_id(0)
        apart = count // 2
    else:
        first = tl.program_id(0) * tiles
        apart = 1
    place = which * count + first
    base = place * tile_bytes
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    total = chain_sums(
        x + which * x_head_stride, w + base, w16 + base // 2, w32 + base // 4,
        n * x_stride, n < m, tile_bytes, apart * tile_bytes, count - first, steps,
        bits, codes, zero, scales, minimum, halves, span_steps, head,
        tiles, 1 if gate else tiles, columns, unroll, stages, compiled,
    )  # fmt: skip
    if factor is not None:
        r = tl.arange(0, tiles * 16)
        of_tile = factor + place + r // 16 * apart
        total *= tl.load(of_tile, mask=first + r // 16 * apart < count, other=0.0)[:, None]
    y_at = which * y_head_stride + n * y_stride
    store(total, y, y_at, n < m, bias, first * 16, rows, limit, gate)


@triton.jit(do_not_specialize=["m"])
def _dense_kernel(
    x,  # (m, columns) bf16
    w,  # (rows, columns) bf16
    y,  # (m, rows)
    bias,  # (rows,) or None
    m,
    rows,  # of a head
    steps,  # columns / 32
    x_stride,
    y_stride,
    x_head_stride,
    y_head_stride,
    tiles: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
    compiled: tl.constexpr,
):
    first = tl.program_id(0) * tiles
    which = tl.program_id(2).to(tl.int64)
    x += which * x_head_stride
    w += (which * rows + first * 16) * (steps * 32)
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
            x0 = activations(x, x_at + column, live & x_live, compiled)
            x1 = activations(x, x_at + column + 16, live & x_live, compiled)
            a0 = activations(w, w_at + column, live & row_live, compiled)
            a1 = activations(w, w_at + column + 16, live & row_live, compiled)
            acc = tl.dot(a1, x1, tl.dot(a0, x0, acc))
    total = folded(acc, tiles * 16, columns)
    y_at = which * y_head_stride + n * y_stride
    store(total, y, y_at, n < m, bias, first * 16, rows, 0.0, 0)
