"""Quantized GEMM: any number of rows times packed matrices; fills in the kernels' arguments.

No card has run blocks of 64 rows yet, nor adapters within products.

Rows are quantized to 8 bits once (``quantize``) and may be multiplied with several matrices. A
result's bits depend on its row and the matrix alone; launch shapes change only the speed. With bf16
matrices, the bits also depend on whether there are more than ``MOST_ROWS`` rows.

Also unpacks rows of packed weights: an embedding's rows, or all rows for a large GEMM. Values equal
the formats' reference bit for bit, except NF4's: its levels are multiples of 1/127, as in products.
"""

from __future__ import annotations

import math
from ctypes import Structure
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.formats import HEAVY, format_macros, steps_at_once
from localrt.quant.cuda.launch import (
    LaunchShape,
    arguments,
    best_shape,
    declarations,
    groups_of,
    launch,
    many_grid,
    pointers,
)
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, INT32, UINT8, Dtype, Tensor, empty, zeros

MOST_ROWS = 64
"""A pass of more rows is prefill."""
GATES = {
    **{"silu": 1, "gelu_tanh": 2, "swiglu_oai": 3, "relu2": 4},
    **{"gelu": 5, "quick_gelu": 6, "clip": 7},  # vision encoders only
    "xielu": 8,  # see ``MlpSpec``
    "swiglu": 9,
}
_MOST_CHAINS = declarations("results.cuh").constants["MOST_CHAINS"]
_SUMS_OF_A_PAIR = 32 * 8  # results of a pair of tiles: weight rows x activation rows
_SIDE = declarations("dense_many.cu").constants["SIDE"]  # rows and columns of results per block
_RECORD = declarations("records.cuh").constants["RECORD"]  # bytes of 64 columns
OUT = {FLOAT32: "float", BFLOAT16: "Bf16"}
"""Names of tensor types in the kernels."""


@dataclass(frozen=True, slots=True)
class TiledMatrix:
    """A matrix in tiles on a device, ``data`` (bytes,) uint8.

    ``factor`` (tiles,), float32, multiplies the values of each tile; None is 1.
    """

    format: str
    shape: tuple[int, int]
    data: Tensor
    factor: Tensor | None = None

    @property
    def count(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.shape[0] // 16)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.data.size // self.count


@dataclass(frozen=True, slots=True)
class Records:
    """Rows quantized to 8 bits: (heads, rows rounded up to a warp's, bytes per row).

    With ``fine``, rows have 15 bits and take two rows of ``data`` each.
    """

    data: Tensor
    heads: int
    rows: int
    columns: int
    fine: bool = False

    @property
    def count(self) -> int:
        """Rows of ``data`` that are in use."""
        return self.rows * (2 if self.fine else 1)

    @property
    def stride(self) -> int:
        """Bytes from a row to the next."""
        return -(-self.columns // 64) * _RECORD

    def values(self) -> npt.NDArray[np.float64]:
        """The values that the records encode, (heads, rows, columns), for checks."""
        heads, count = self.heads, self.count
        records = self.data.to_host()[:, :count].reshape(heads, count, -1, _RECORD)
        codes = records[..., :64].view(np.int8).reshape(*records.shape[:3], 4, 2, 2, 4)
        scales = np.ascontiguousarray(records[..., 128:]).view(np.float32)
        steps = codes.transpose(0, 1, 2, 4, 5, 3, 6).reshape(*records.shape[:3], 2, 32)
        whole = steps.astype(np.float64) * scales.reshape(*records.shape[:3], 2, 2)[..., :1]
        parts = whole.reshape(heads, self.rows, count // self.rows, -1)
        values: npt.NDArray[np.float64] = parts.sum(2)[..., : self.columns]
        return values


_Quantize = arguments("quantize.cu", "Quantize")
_Dense = arguments("dense.cu", "Dense")
_DenseMany = arguments("dense_many.cu", "DenseMany")
_Linear = arguments("linear.cuh", "Linear")
_MOST_SHARED = 4096  # blocks of products whose blocks share rows


@declarations("low_rank.cuh").struct("AdaptedRows")
class AdaptedRows(Structure):
    """What adapters change in products with some rows, which may be ``records``."""

    records: bool
    tensors: tuple[Tensor, ...]  # whose addresses it has


class _Adapted(Structure):
    _fields_ = (("linear", _Linear), ("change", AdaptedRows))


def empty_records(
    heads: int, rows: int, columns: int, device: Device, *, fine: bool = False
) -> Records:
    """Uninitialized records for a kernel to write."""
    count = rows * (2 if fine else 1)
    whole = 8 * groups_of(count)  # warps load rows beyond the last and discard their results
    size = heads, -(-count // whole) * whole, -(-columns // 64) * _RECORD
    data = empty(*size, dtype=UINT8, device=device)
    return Records(data, heads, rows, columns, fine)


def quantize(x: Tensor, *, fine: bool = False) -> Records:
    """x (R, columns) or (H, R, columns), bf16 or float32, as records; columns are contiguous."""
    heads = x.shape[0] if len(x.shape) == 3 else 1
    rows, columns = x.shape[-2:]
    records = empty_records(heads, rows, columns, x.device, fine=fine)
    args = _Quantize(
        *pointers(x, records.data),
        x.strides[0] if heads > 1 else 0,
        records.data.strides[0],
        x.strides[-2],
        records.stride,
        rows,
        columns,
    )
    program = Program.of("quantize", IN=OUT[x.dtype], FINE=int(fine))
    launch(x.device, program, (rows, -(-columns // 256), heads), 256, args)
    return records


def product(
    x: Records,
    weight: TiledMatrix,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    limit: float = math.inf,
    division: LaunchShape | None = None,
    change: AdaptedRows | None = None,
) -> None:
    """out (R, rows) = x (R, columns) @ weight.T.

    With ``gate``, the weight stacks F gate rows and F up rows, F a multiple of 16, and out (R, F)
    is activation(gate) * up; ``limit`` is that of ``ExpertSpec``. With H heads the weight stacks H
    matrices of whole tiles, and out is (H, R, rows / H).

    ``change`` is for few rows, and applied before the gate. A matrix in several parts passes it to
    each in order.
    """
    heads = x.heads
    rows, columns = weight.shape[0] // heads, weight.shape[1]
    tiles, steps = -(-rows // 16), columns // 32
    many = None
    if division is None:
        if heads == 1:
            many = many_grid(weight.format, x.count, tiles, out.device.processors)
        division = best_shape(weight.format, x.count, tiles * heads, out.device.processors)
    chains = chains_of(weight.format, columns)
    parts = min(division.parts, chains)
    warps = -(-chains // parts)
    blocks = -(-(tiles // 2 if gate else tiles) // (division.pairs * (1 if gate else 2)))
    grid = (blocks, parts, heads * -(-x.count // (8 * division.groups)))
    partial = arrived = None
    if many is None and parts > 1:
        size = blocks * grid[2] * parts * warps * division.groups * division.pairs * _SUMS_OF_A_PAIR
        partial = empty(size, device=out.device)
        arrived = _counters(out.device)
        assert blocks * grid[2] <= _MOST_SHARED, "only short products are shared out"
    args = _Linear(
        *pointers(x.data, weight.data, out, bias, weight.factor, partial, arrived),
        x.stride * x.data.shape[-2],
        out.strides[0] if heads > 1 else 0,
        weight.tile_bytes,
        x.stride,
        out.strides[-2],
        x.count,
        rows // 2 if gate else rows,
        tiles,
        steps,
        chains,
        limit,
    )
    if many is not None:
        narrow = x.count <= MOST_ROWS
        program = many_program(weight.format, gate, out.dtype, fine=x.fine, narrow=narrow)
        launch(out.device, program, many, 256, args)
        return
    adapted = None if change is None else change.records
    program = linear_program(
        weight.format, x.count, division, gate, out.dtype, fine=x.fine, adapted=adapted
    )
    if change is not None:
        change.helpers = min(blocks, -(-change.missing // (warps * grid[2])))
        change.blocks = (change.helpers + blocks) * grid[2]
        change.counters = _counters(out.device)[_MOST_SHARED:].address
        args, grid = _Adapted(args, change), (blocks, 1 + parts, grid[2])
        change.missing, change.first = 0, change.first + weight.shape[0]
    launch(out.device, program, grid, 32 * warps, args)


def dense_product(x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
    """out (R, rows) = x (R, columns) @ weight (rows, columns).T, x and weight bf16.

    With x (H, R, columns) the weight stacks H matrices, and out is (H, R, rows / H). Unlike cuBLAS,
    the order of sums does not depend on R, except that more than ``MOST_ROWS`` rows with a multiple
    of eight columns use tensor cores (Ampere and later), which sum in another order.
    """
    tensor_cores = not out.device.is_gpu or out.device.capability >= (8, 0)
    whole = len(x.shape) == 2 and not (x.shape[1] | x.strides[0]) % 8
    if tensor_cores and whole and len(x) > MOST_ROWS:
        _dense_many(x, weight, out, bias)
        return
    heads = x.shape[0] if len(x.shape) == 3 else 1
    rows, count = weight.shape[0] // heads, x.shape[-2]
    args = _Dense(
        *pointers(x, weight, out, bias),
        x.strides[0] if heads > 1 else 0,
        out.strides[0] if heads > 1 else 0,
        x.strides[-2],
        out.strides[-2],
        count,
        rows,
        weight.shape[1],
    )
    grid = (-(-rows // 8), -(-count // 8), heads)
    program = Program.of("dense", OUT=OUT[out.dtype], WIDE=int(weight.shape[1] % 8 == 0))
    launch(out.device, program, grid, 256, args)


def _dense_many(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> None:
    count, (rows, columns) = len(x), weight.shape
    args = _DenseMany(
        *pointers(x, weight, out, bias), x.strides[0], out.strides[0], count, rows, columns
    )
    grid = (-(-rows // _SIDE), -(-count // _SIDE), 1)
    launch(out.device, Program.of("dense_many", OUT=OUT[out.dtype]), grid, 256, args)


@cache
def linear_program(
    format_: str,
    rows: int,
    division: LaunchShape,
    gate: str | None,
    out: Dtype,
    *,
    fine: bool = False,
    adapted: bool | None = None,
) -> Program:
    """The variant of the kernel for ``rows`` rows of records. ``adapted`` is whether adapters read
    records; None without adapters.
    """
    return Program.of(
        "linear",
        **format_macros(format_),
        PAIRS_=division.pairs,
        WIDTH="ONE" if rows == 1 else "FEW" if rows <= 4 else "MANY",
        NT_=division.groups,
        GATE=GATES[gate] if gate else 0,
        OUT=OUT[out],
        BLOCKS=2 if division.groups == 1 and format_ not in HEAVY else 1,  # per processor
        FINE=int(fine),
        ADAPTED=int(adapted is not None),
        RECORDS=int(adapted or False),
    )


@cache
def many_program(
    format_: str, gate: str | None, out: Dtype, *, fine: bool = False, narrow: bool = False
) -> Program:
    """The kernel for many rows of records; ``narrow`` is for up to 64."""
    return Program.of(
        "linear_many",
        **format_macros(format_),
        NARROW=int(narrow),
        GATE=GATES[gate] if gate else 0,
        OUT=OUT[out],
        FINE=int(fine),
    )


@cache
def chains_of(format_: str, columns: int) -> int:
    """The number of warps that share a row's columns: the fewest that are as fast as eight.

    It depends on the columns alone, since it decides the order of sums.
    """
    turns = -(-columns // (32 * steps_at_once(format_)))
    return -(-turns // -(-turns // _MOST_CHAINS))


@cache
def _counters(device: Device) -> Tensor:
    """Zeroed counters; kernels reset those they use."""
    size = _MOST_SHARED + 3  # those of ``AdaptedRows`` are the last
    return zeros(size, dtype=INT32, device=device, pool=device.persistent)


_WARPS = 8

_Unpack = arguments("unpack.cu", "Unpack")


def unpack_rows(
    weight: TiledMatrix,
    out: Tensor,
    *,
    first: int = 0,
    index: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """out (n, columns), contiguous, bf16 or float32: rows from ``first`` on, or the rows ``index``
    (n,), int64 on the device.

    ``factor`` multiplies every value.
    """
    n, steps = len(out), weight.shape[1] // 32
    args = _Unpack(
        *pointers(weight.data, weight.factor, index, out),
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
