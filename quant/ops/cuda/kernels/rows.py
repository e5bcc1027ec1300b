"""Rows of packed weights as numbers: an embedding's rows, or all rows for a product of many.

Values are those of the formats' reference, bit for bit, but NF4's, whose levels are 127ths as in
the products.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_void_p

from torch import Tensor

from localrt.quant.ops.cuda.kernels.formats import format_macros
from localrt.quant.ops.cuda.kernels.launch import launch
from localrt.quant.ops.cuda.kernels.products import OUT, TiledMatrix
from localrt.quant.ops.cuda.kernels.programs import Program

_WARPS = 8


class _Unpack(Structure):
    _fields_ = (
        ("w", c_void_p),
        ("factors", c_void_p),
        ("index", c_void_p),
        ("y", c_void_p),
        ("tile_bytes", c_int64),
        ("n", c_int),
        ("first", c_int),
        ("steps", c_int),
        ("factor", c_float),
    )


def unpack_rows(
    weight: TiledMatrix,
    out: Tensor,
    *,
    first: int = 0,
    index: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """out (n, columns), contiguous, bf16 or float32: rows from ``first`` on, or those of ``index``.

    ``index`` (n,) is int64 on the device. ``factor`` multiplies every value.
    """
    n, steps = len(out), weight.shape[1] // 32
    args = _Unpack(
        weight.data.data_ptr(),
        None if weight.factor is None else weight.factor.data_ptr(),
        None if index is None else index.data_ptr(),
        out.data_ptr(),
        weight.tile_bytes,
        n,
        first,
        steps,
        factor,
    )
    lines = n if index is not None else -(-(first + n) // 4) - first // 4
    program = Program.of(
        "unpack",
        **format_macros(weight.format),
        OUT=OUT[out.dtype],
        INDEXED=0 if index is None else 1,
    )
    grid = (-(-steps // 8), -(-lines // _WARPS), 1)
    launch(out.device, program, grid, 32 * _WARPS, args)
