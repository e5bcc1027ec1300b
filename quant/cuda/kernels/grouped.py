"""Products of rows with many experts at once, each row with those that it chose.

Experts of one launch differ in addresses alone, which a table on the card has: the card itself
finds which block computes what. A slot is one choice of one row, as ``quant/ops/experts.py`` says;
its bits are those of ``product`` with its expert alone, whatever else is computed.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_ubyte, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.cuda.kernels.formats import HEAVY, format_macros
from localrt.quant.cuda.kernels.launch import launch
from localrt.quant.cuda.kernels.products import (
    GATES,
    OUT,
    Records,
    chains_of,
)
from localrt.quant.cuda.kernels.programs import Program
from localrt.quant.cuda.kernels.routing import MOST_EXPERTS
from localrt.quant.formats import FORMATS
from localrt.quant.formats.affine import AFFINE
from localrt.quant.formats.tiled import TILE_ROWS

ADDRESSES = 8
"""Of an expert: tiles of gate, up and down; their factors; biases of gate and up, and of down.

Without a gate, up is in its place.
"""

_MOST_ENTRIES = 32
# As HEAVY, of experts.
_HEAVY = HEAVY | {*(name for name, codec in AFFINE.items() if codec.bits == 6)}
_Bits = c_ubyte * (MOST_EXPERTS // 8)


@dataclass(frozen=True, slots=True)
class Side:
    """Gate and up, or down, of experts that are computed together; sizes are of one matrix."""

    format: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The slots of some experts, by expert, and which of them a block computes; on the card.

    ``parts`` (most, 3) int32 are an expert, the place of its first slot in ``slots`` and how many
    there are, at most ``size``. A row of x has ``used`` slots.
    """

    parts: Tensor
    slots: Tensor
    size: int
    used: int


class _Plan(Structure):
    _fields_ = (
        ("chosen", c_void_p),
        ("parts", c_void_p),
        ("slots", c_void_p),
        ("count", c_int),
        ("used", c_int),
        ("stride", c_int),
        ("most", c_int),
        ("size", c_int),
        ("wanted", _Bits),
    )


class _Entries(Structure):
    _fields_ = (
        ("table", c_void_p),
        ("words", c_uint64 * (_MOST_ENTRIES * ADDRESSES)),
        ("experts", c_int * _MOST_ENTRIES),
    )


class _Grouped(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("experts", c_void_p),
        ("parts", c_void_p),
        ("slots", c_void_p),
        ("tile_bytes", c_int64),
        ("x_stride", c_int),
        ("y_stride", c_int),
        ("per", c_int),
        ("rows", c_int),
        ("tiles", c_int),
        ("steps", c_int),
        ("limit", c_float),
    )


def write_entries(
    table: Tensor, experts: npt.NDArray[np.intp], entries: npt.NDArray[np.int64]
) -> None:
    """Write ``entries`` (n, ADDRESSES) of ``experts`` (n,) to the table (E, ADDRESSES) int64.

    Kernels that are started later see them.
    """
    for first in range(0, len(experts), _MOST_ENTRIES):
        some = slice(first, first + _MOST_ENTRIES)
        args = _Entries(table.data_ptr())
        count = len(experts[some])
        np.ctypeslib.as_array(args.words)[: count * ADDRESSES] = entries[some].reshape(-1)
        np.ctypeslib.as_array(args.experts)[:count] = experts[some]
        launch(table.device, _ENTRIES, (1, 1, 1), count * ADDRESSES, args)


def plan_slots(chosen: Tensor, wanted: npt.NDArray[np.bool_]) -> Plan:
    """A pass whose rows chose the experts ``chosen`` (R, K) int32, of which ``wanted`` (E,) are
    computed. Rows of ``chosen`` may lie apart.
    """
    rows, used = chosen.shape
    experts, slots = int(np.count_nonzero(wanted)), rows * used
    size = rows_at_once(rows, used, len(wanted))
    whole = (slots + min(experts, slots) * (size - 1)) // size
    most = max(1, min(whole, experts * -(-rows // size)))
    parts = torch.empty(most, 3, dtype=torch.int32, device=chosen.device)
    order = torch.empty(slots, dtype=torch.int32, device=chosen.device)
    bits = np.packbits(wanted, bitorder="little")
    args = _Plan(
        chosen.data_ptr(),
        parts.data_ptr(),
        order.data_ptr(),
        slots,
        used,
        chosen.stride(0),
        most,
        size,
        _Bits.from_buffer_copy(bits.tobytes().ljust(MOST_EXPERTS // 8, b"\0")),
    )
    launch(chosen.device, _PLAN, (1, 1, 1), -(-len(wanted) // 32) * 32, args)
    return Plan(parts, order, size, used)


def rows_at_once(rows: int, used: int, experts: int) -> int:
    """How many slots of one expert a block takes. Results do not depend on it."""
    if rows <= 4:
        return 1 if rows == 1 else 4
    each = rows * used / experts
    return 8 if each <= 6 or rows <= 8 else 16 if each <= 12 else 24


def grouped_gate_up(
    x: Records, plan: Plan, table: Tensor, side: Side, activation: str, limit: float
) -> Tensor:
    """activation(gate) * up of each of the plan's slots, bf16: (R * K, F), others undefined.

    Of ``relu2``, which has no gate, activation(up).
    """
    slots = len(plan.slots)
    out = torch.empty(slots, side.rows, dtype=torch.bfloat16, device=table.device)
    _launch(x, out, plan, table, side, activation, limit, plan.used)
    return out


def grouped_down(inner: Records, out: Tensor, plan: Plan, table: Tensor, side: Side) -> None:
    """Down of each of the plan's slots of ``inner`` (R * K, F), to ``out`` (R * K, D), float32."""
    _launch(inner, out, plan, table, side, None, 0.0, 1)


@cache
def grouped_program(
    format_: str, size: int, gate: str | None, out: torch.dtype, *, fine: bool = False
) -> Program:
    """The variant of the kernel for ``size`` slots of an expert at once."""
    size *= 2 if fine else 1
    return Program.of(
        "grouped",
        **format_macros(format_),
        PAIRS_=1,
        WIDTH="ONE" if size == 1 else "FEW" if size <= 4 else "MANY",
        NT_=max(1, size // 8),
        GATE=GATES[gate] if gate else 0,
        OUT=OUT[out],
        BLOCKS=2 if size <= 8 and format_ not in _HEAVY else 1,
        FINE=int(fine),
    )


def _launch(
    x: Records,
    y: Tensor,
    plan: Plan,
    table: Tensor,
    side: Side,
    gate: str | None,
    limit: float,
    per: int,
) -> None:
    tiles, steps = -(-side.rows // 16), side.columns // 32
    args = _Grouped(
        x.data.data_ptr(),
        y.data_ptr(),
        table.data_ptr(),
        plan.parts.data_ptr(),
        plan.slots.data_ptr(),
        _tile_bytes(side.format, side.columns),
        x.stride,
        y.stride(0),
        per,
        side.rows,
        tiles,
        steps,
        limit,
    )
    program = grouped_program(side.format, plan.size, gate, y.dtype, fine=x.fine)
    paired = gate not in (None, "relu2")
    grid = (tiles if paired else -(-tiles // 2), len(plan.parts), 1)
    launch(y.device, program, grid, 32 * chains_of(side.format, side.columns), args)


@cache
def _tile_bytes(format_: str, columns: int) -> int:
    """Of 16 rows."""
    return TILE_ROWS * FORMATS[format_].row_bytes(columns)


_PLAN = Program.of("plan")
_ENTRIES = Program.of("entries")
