"""Adapters on a GPU: A and B in bf16, added to the products of a pass's rows.

Two kernels apply the adapters of a product: in the first, a warp computes one rank of A @ x for a
row; in the second, a thread computes one output of B. Each row may have its own adapter; its bits
depend on the row and the adapter alone. A pass's arrays stay on the GPU for the next pass of the
same kind. Passes with adapters are not recorded as graphs. If layers are on both CPU and GPU, each
device has a copy within its own budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure, sizeof
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.launch import arguments, declarations, launch, pointers
from localrt.quant.cuda.products import OUT, Records
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, Dtype, Tensor, empty, upload
from localrt.quant.formats.convert import bf16_bits
from localrt.quant.ops.adapters import (
    Adapter,
    AdapterTable,
    LowRank,
    adapted_rows,
    joined,
)
from localrt.quant.ops.protocol import Batch

_THREADS = 256


@declarations("low_rank.cuh").struct("Change")
class Change(Structure):
    """One adapter matrix applied to ``count`` rows from ``row`` on; uploaded as an array."""


_Down = arguments("low_rank_down.cu", "LowRankDown")
_Up = arguments("low_rank_up.cu", "LowRankUp")


def add_low_rank(
    changes: Tensor,
    x: Tensor | Records,
    y: Tensor,
    *,
    columns: int,
    count: int,
    rank: int,
    rows: int,
    bias: Tensor | None = None,
) -> None:
    """Change y (R, n), bf16 or float32, in place; x (R, columns) is bf16 or records.

    ``changes`` is an array of ``Change`` on the device; ``count``, ``rank`` and ``rows`` are the
    largest among them. ``bias`` (n,), float32, is the bias already included in y.
    """
    number = changes.size // sizeof(Change)
    between = empty(number, count, rank, dtype=FLOAT32, device=y.device)
    recorded = isinstance(x, Records)
    data = x.data if isinstance(x, Records) else x
    stride = x.stride if isinstance(x, Records) else 2 * x.strides[0]
    fine = isinstance(x, Records) and x.fine
    down, up = low_rank_programs(y.dtype, records=recorded, fine=fine)
    first = _Down(changes.address, data.address, between.address, stride, columns, rank)
    launch(y.device, down, (count, -(-32 * rank // _THREADS), number), _THREADS, first)
    second = _Up(*pointers(changes, between, bias, y), y.strides[0], rank)
    launch(y.device, up, (count, -(-rows // _THREADS), number), _THREADS, second)


def low_rank_programs(
    out: Dtype, *, records: bool = False, fine: bool = False
) -> tuple[Program, Program]:
    """The programs that ``add_low_rank`` launches."""
    down = Program.of("low_rank_down", RECORDS=int(records), FINE=int(fine))
    return down, Program.of("low_rank_up", OUT=OUT[out])


_KEPT = 4  # kinds of passes whose changes are cached on the device


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

    def on_host(self) -> LowRank:
        """A copy in float32."""
        factors = None if self.factors is None else self.factors.to_host()
        return LowRank(self.a.to_host(), self.b.to_host(), factors)


@dataclass(frozen=True, slots=True)
class _Changes:
    """The changes of a product in one kind of pass."""

    array: Tensor  # of ``Change``
    count: int  # the maximum; also rank and rows
    rank: int
    rows: int
    where: Tensor  # rows of the pass, each once, int64


class CudaAdapters:
    """Adds the adapters' changes to products of the current pass."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.table = _Table(self)
        self.of_rows: list[tuple[slice, Adapter[CudaLowRank]]] = []
        self.tokens: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # of the pass
        # Keys: the pass's adapters and rows, then the matrix's tensors.
        self._kept: dict[tuple[object, ...], dict[tuple[str, ...], _Changes | None]] = {}
        self._changes: dict[tuple[str, ...], _Changes | None] = {}

    def begin(self, batch: Batch) -> None:
        """Begin a pass."""
        self.of_rows = adapted_rows(self.table, batch.mixes)
        self.tokens = batch.tokens
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
        """The rows that adapters change, for the matrix whose tensors begin at ``starts``."""
        found = self._of(starts)
        return None if found is None else found.where

    def add_to(
        self, y: Tensor, x: Tensor | Records, starts: Mapping[str, int], bias: Tensor | None
    ) -> None:
        """Change y (R, n), the product of x (R, columns) with the matrix, ``bias`` included."""
        found = self._of(starts)
        if found is None:
            return
        add_low_rank(
            found.array,
            x,
            y,
            columns=x.columns if isinstance(x, Records) else x.shape[1],
            count=found.count,
            rank=found.rank,
            rows=found.rows,
            bias=bias,
        )

    def _of(self, starts: Mapping[str, int]) -> _Changes | None:
        if not self.of_rows:
            return None
        names = tuple(starts)
        if names not in self._changes:
            self._changes[names] = self._make(starts)
        return self._changes[names]

    def _make(self, starts: Mapping[str, int]) -> _Changes | None:
        found = [
            (part, first, low)
            for name, first in starts.items()
            for part, adapter in self.of_rows
            if (low := adapter.matrices.get(name)) is not None
        ]
        if not found:
            return None
        array = (Change * len(found))()
        for place, (part, first, low) in enumerate(found):
            places, count = pointers(low.a, low.b, low.factors), part.stop - part.start
            array[place] = Change(*places, len(low.a), len(low.b), part.start, count, first)
        rows = np.concatenate([np.arange(part.start, part.stop) for part, _, _ in found])
        return _Changes(
            upload(np.frombuffer(bytes(array), np.uint8), self._device),
            max(change.count for change in array),
            max(change.rank for change in array),
            max(change.rows for change in array),
            upload(np.unique(rows), self._device),
        )

    def packed(self, matrices: Mapping[str, LowRank]) -> dict[str, CudaLowRank]:
        """Copies on the device."""
        return {name: self._pack(part) for name, part in matrices.items()}

    def _pack(self, part: LowRank) -> CudaLowRank:
        device = self._device
        a, b = (
            upload(bf16_bits(each), device, dtype=BFLOAT16, pool=device.persistent)
            for each in (part.a, part.b)
        )
        factors = None
        if part.factors is not None:
            factors = upload(part.factors.astype(np.float32), device, pool=device.persistent)
        return CudaLowRank(a, b, factors)

    def joined(self, parts: Sequence[tuple[CudaLowRank, float]]) -> CudaLowRank:
        """Several adapters of one matrix joined into one, on the host."""
        return self._pack(joined([(part.on_host(), weight) for part, weight in parts]))


class _Table(AdapterTable[CudaLowRank]):
    """The adapters on a device; removed ones are freed at once."""

    def __init__(self, owner: CudaAdapters) -> None:
        super().__init__(owner.packed, owner.joined)
        self._owner = owner

    def remove(self, key: str) -> None:
        super().remove(key)
        self._owner.forget()
