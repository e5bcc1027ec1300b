"""Adapters on a GPU: A and B in bf16, added to the products of a pass's rows.

Short passes have two kernels for all changes of a product: a warp takes a rank of a row's A, then a
thread a row of its B. Every row may have another adapter, and its bits depend on that row and its
change alone; what a pass's rows need stays on the GPU for the next pass of the same kind. Such
passes are not recorded as graphs. Long passes take a sequence at a time by torch. Where a placement
has units on both sides, each side has a copy, in its own budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure, c_int, c_longlong, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from localrt.quant.cpu.abi import fields
from localrt.quant.cuda.launch import launch, pointers, upload
from localrt.quant.cuda.products import MOST_ROWS, OUT, Records
from localrt.quant.cuda.programs import Program
from localrt.quant.ops.adapters import (
    Adapter,
    AdapterTable,
    LowRank,
    adapted_rows,
    joined_factors,
)
from localrt.quant.ops.protocol import Batch

_THREADS = 256


class Change(Structure):
    """Of one row by one matrix; see ``quant/cuda/src/low_rank.cuh``. An array of them is
    uploaded.
    """

    _fields_ = fields((c_void_p, "a b factors"), (c_int, "rank rows row first"))


class _Down(Structure):
    _fields_ = fields((c_void_p, "changes x y"), (c_longlong, "x_stride"), (c_int, "columns most"))


class _Up(Structure):
    _fields_ = fields((c_void_p, "changes x bias y"), (c_int, "y_stride most"))


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
    count = changes.numel() // _CHANGE_NBYTES
    between = torch.empty(count, rank, dtype=torch.float32, device=y.device)
    recorded = isinstance(x, Records)
    data = x.data if isinstance(x, Records) else x
    stride = x.stride if isinstance(x, Records) else 2 * x.stride(0)
    fine = isinstance(x, Records) and x.fine
    down, up = low_rank_programs(y.dtype, records=recorded, fine=fine)
    first = _Down(changes.data_ptr(), data.data_ptr(), between.data_ptr(), stride, columns, rank)
    launch(y.device, down, (count, -(-32 * rank // _THREADS), 1), _THREADS, first)
    second = _Up(
        *pointers(changes, between, bias, y),
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


_CHANGE_NBYTES = 40  # bytes of a Change
_KEPT = 4  # kinds of passes whose changes stay on the device


@dataclass(frozen=True, slots=True, eq=False)
class CudaLowRank:
    """A ``LowRank`` on the device: a (rank, columns), b (rows, rank), bf16; factors (rows,)."""

    a: Tensor
    b: Tensor
    factors: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        factors = 0 if self.factors is None else self.factors.nbytes
        return int(self.a.nbytes + self.b.nbytes + factors)


@dataclass(frozen=True, slots=True)
class _Changes:
    """Of a product's rows in one kind of pass."""

    array: Tensor  # of ``Change``
    rank: int  # the most of any
    rows: int
    where: Tensor  # rows of the pass, each once


class CudaAdapters:
    """Adds adapters' changes to a GPU's products in the latest pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.table = _Table(self)
        self.of_rows: list[tuple[slice, Adapter[CudaLowRank]]] = []
        self._rows = 0
        # By the pass's adapters and rows, then by the matrix's tensors.
        self._kept: dict[tuple[object, ...], dict[tuple[str, ...], _Changes | None]] = {}
        self._changes: dict[tuple[str, ...], _Changes | None] = {}

    def begin(self, batch: Batch) -> None:
        """A pass begins."""
        self.of_rows = adapted_rows(self.table, batch.mixes)
        self._rows = len(batch.tokens)
        if not self.of_rows:
            return
        kind = tuple((part.start, part.stop, adapter) for part, adapter in self.of_rows)
        self._changes = self._kept.pop(kind, {})
        self._kept[kind] = self._changes
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]

    def forget(self) -> None:
        """Forget an adapter that was removed, so that its memory is freed."""
        self._kept.clear()
        self._changes, self.of_rows = {}, []

    def changed_rows(self, starts: Mapping[str, int]) -> Tensor | None:
        """The rows of the pass with changes of the matrix whose tensors begin at ``starts``."""
        found = self._of(starts)
        return None if found is None else found.where

    def add_to(
        self, y: Tensor, x: Tensor | Records, starts: Mapping[str, int], bias: Tensor | None
    ) -> None:
        """Change y (R, n), the product of x (R, columns) with the matrix, ``bias`` included."""
        found = self._of(starts)
        if found is None:
            return
        if isinstance(x, Records) or self._rows <= MOST_ROWS:
            columns = x.columns if isinstance(x, Records) else x.shape[1]
            if isinstance(x, Tensor) and x.stride(1) != 1:
                x = x.contiguous()
            add_low_rank(
                found.array,
                x,
                y,
                columns=columns,
                rank=found.rank,
                rows=found.rows,
                bias=None if bias is None else bias.float(),
            )
            return
        for name, first in starts.items():
            for part, adapter in self.of_rows:
                if (low := adapter.matrices.get(name)) is None:
                    continue
                own = y[part, first : first + len(low.b)]
                if low.factors is not None:
                    known = 0 if bias is None else bias[first : first + len(low.b)]
                    own.copy_((own.float() - known) * low.factors + known)
                own += ((x[part] @ low.a.T) @ low.b.T).to(own.dtype)

    def _of(self, starts: Mapping[str, int]) -> _Changes | None:
        if not self.of_rows:
            return None
        names = tuple(starts)
        if names not in self._changes:
            self._changes[names] = self._make(starts)
        return self._changes[names]

    def _make(self, starts: Mapping[str, int]) -> _Changes | None:
        found = [
            (row, first, low)
            for name, first in starts.items()
            for part, adapter in self.of_rows
            if (low := adapter.matrices.get(name)) is not None
            for row in range(part.start, part.stop)
        ]
        if not found:
            return None
        array = (Change * len(found))()
        for place, (row, first, low) in enumerate(found):
            places = pointers(low.a, low.b, low.factors)
            array[place] = Change(*places, len(low.a), len(low.b), row, first)
        lows = [low for _, _, low in found]
        return _Changes(
            upload(np.frombuffer(bytes(array), np.uint8), self._device),
            max(len(low.a) for low in lows),
            max(len(low.b) for low in lows),
            torch.tensor(sorted({row for row, _, _ in found}), device=self._device),
        )

    def packed(self, matrices: Mapping[str, LowRank]) -> dict[str, CudaLowRank]:
        """On the device."""
        return {name: self._pack(part) for name, part in matrices.items()}

    def _pack(self, part: LowRank) -> CudaLowRank:
        a, b = (
            torch.from_numpy(np.ascontiguousarray(each)).to(self._device, torch.bfloat16)
            for each in (part.a, part.b)
        )
        factors = None
        if part.factors is not None:
            factors = torch.from_numpy(part.factors).to(self._device, torch.float32)
        return CudaLowRank(a, b, factors)


class _Table(AdapterTable[CudaLowRank]):
    """The adapters on a device; removed ones are freed at once."""

    def __init__(self, owner: CudaAdapters) -> None:
        super().__init__(owner.packed, _joined)
        self._owner = owner

    def remove(self, key: str) -> None:
        super().remove(key)
        self._owner.forget()


def _joined(parts: Sequence[tuple[CudaLowRank, float]]) -> CudaLowRank:
    """Several changes of one matrix as one: their ranks side by side."""
    a = torch.cat([part.a for part, _ in parts])
    b = torch.cat([(part.b.float() * weight).bfloat16() for part, weight in parts], dim=1)
    of_rows = [
        (None if part.factors is None else part.factors.cpu().numpy(), weight)
        for part, weight in parts
    ]
    factors = joined_factors(of_rows)
    there = None if factors is None else torch.from_numpy(factors).to(a.device)
    return CudaLowRank(a, b.contiguous(), there)
