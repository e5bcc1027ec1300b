"""Low-rank changes of the rows of a short pass, each row's own: two kernels for all of a product.

A row's bits depend on that row and its change alone.
"""

from __future__ import annotations

from ctypes import Structure, c_int, c_longlong, c_void_p

import torch
from torch import Tensor

from localrt.quant.cuda.kernels.launch import launch
from localrt.quant.cuda.kernels.products import OUT, Records
from localrt.quant.cuda.kernels.programs import Program

_THREADS = 256


class Change(Structure):
    """Of one row by one matrix; see ``quant/cuda/src/low_rank.cuh``. An array of them is
    uploaded.
    """

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("factors", c_void_p),
        ("rank", c_int),
        ("rows", c_int),
        ("row", c_int),
        ("first", c_int),
    )


class _Down(Structure):
    _fields_ = (
        ("changes", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("x_stride", c_longlong),
        ("columns", c_int),
        ("most", c_int),
    )


class _Up(Structure):
    _fields_ = (
        ("changes", c_void_p),
        ("x", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int),
        ("most", c_int),
    )


def add_low_rank(
    changes: Tensor,
    x: Tensor | Records,
    y: Tensor,
    *,
    columns: int,
    rank: int,
    rows: int,
    bias: Tensor | None = None,
) -> None:
    """Change y (R, n), bf16 or float32, in place; x (R, columns) is bf16 or records.

    ``changes`` is an array of ``Change`` on the device, ``rank`` and ``rows`` the most of any.
    ``bias`` (n,) is what y has of it already, float32.
    """
    count = changes.numel() // _SIZE
    between = torch.empty(count, rank, dtype=torch.float32, device=y.device)
    recorded = isinstance(x, Records)
    data = x.data if isinstance(x, Records) else x
    stride = x.stride if isinstance(x, Records) else 2 * x.stride(0)
    fine = isinstance(x, Records) and x.fine
    down, up = low_rank_programs(y.dtype, records=recorded, fine=fine)
    first = _Down(changes.data_ptr(), data.data_ptr(), between.data_ptr(), stride, columns, rank)
    launch(y.device, down, (count, -(-32 * rank // _THREADS), 1), _THREADS, first)
    second = _Up(
        changes.data_ptr(),
        between.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        y.stride(0),
        rank,
    )
    launch(y.device, up, (count, -(-rows // _THREADS), 1), _THREADS, second)


def low_rank_programs(
    out: torch.dtype, *, records: bool = False, fine: bool = False
) -> tuple[Program, Program]:
    """What is launched."""
    down = Program.of("low_rank_down", RECORDS=int(records), FINE=int(fine))
    return down, Program.of("low_rank_up", OUT=OUT[out])


_SIZE = 40  # bytes of a Change
