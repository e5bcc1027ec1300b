"""Products of 1 to 64 rows with bf16 weights, in sums whose order follows from the columns alone.

The steps of 32 columns are dealt out to 16 chains, two for each warp of a program. Batched dots
keep Triton from Hopper's ``wgmma``, which takes other sums for some sizes. (Packed weights have
CUDA kernels: ``quant/ops/cuda/products.py``.)
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localrt.quant.ops.triton import device as triton_device
from localrt.quant.ops.triton.chains import activations, folded, store
from localrt.quant.ops.triton.formats import TritonLayout

__all__ = ["Tiles", "Tiling", "dense_linear", "tiling"]

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

    format: str
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


def dense_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    cut: Tiling | None = None,
) -> None:
    """out (M, rows) = x (M, columns) @ weight (rows, columns).T, all bf16, M at most 64.

    ``columns`` is a multiple of 32. With x (H, M, columns) the weight stacks H matrices, and out is
    (H, M, rows / H). cuBLAS would choose its order of sums by M.
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
