"""Adapters on a GPU: A and B in bf16, added to the products of a pass's rows.

No card has run its tables yet, nor adapters within products.

A warp computes one rank of A @ x for a row; then a thread computes one output of B. The kernel for
few rows does both beside its product (``products.product``); after others come two kernels. Each
row may have its own adapter; its bits depend on the row and the adapter alone. Each matrix has a
table of the adapters in use, and a pass tells each row's place in all tables: both stay where they
are, so that recorded passes serve all adapters. If layers are on both CPU and GPU, each device has
a copy within its own budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure, sizeof
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.launch import declarations, launch, pointers
from localrt.quant.cuda.products import MOST_ROWS, OUT, AdaptedRows, Records
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, INT32, Tensor, empty, upload
from localrt.quant.formats.convert import bf16_bits
from localrt.quant.ops.adapters import Adapter, AdapterTable, LowRank, adapted_rows, joined
from localrt.quant.ops.protocol import Batch

_THREADS = 256


@declarations("low_rank.cuh").struct("Change")
class Change(Structure):
    """What an adapter does to some columns of a product; uploaded as an array."""


def adapted_products(
    changes: Tensor, places: Tensor, x: Tensor | Records, *, parts: int, rank: int
) -> AdaptedRows:
    """What changes in products with x (R, columns), bf16 or records.

    ``changes`` is an array of ``Change`` on the device, as many for each of ``parts`` of the
    matrix's rows; ``places`` (R,), int32, are those of the rows' changes in each part, -1 for none.
    ``rank`` is the largest among them, or more.
    """
    data = x.data if isinstance(x, Records) else x
    stride = x.stride if isinstance(x, Records) else 2 * x.strides[0]
    rows, columns = (x.rows, x.columns) if isinstance(x, Records) else x.shape
    sums = empty(parts, rows, rank, dtype=FLOAT32, device=data.device)
    tensors = changes, places, data, sums
    each = changes.size // sizeof(Change) // parts
    sizes = stride, parts, each, columns, rows, rank
    made = AdaptedRows(*pointers(*tensors, None, None, None), *sizes, missing=sums.size)
    made.tensors, made.records = tensors, isinstance(x, Records)
    return made


def add_low_rank(
    change: AdaptedRows, y: Tensor, bias: Tensor | None = None, *, fine: bool = False
) -> None:
    """Change the product y (R, n), bf16 or float32, in place. ``bias`` (n,), float32, is the bias
    already included in y.
    """
    (rows, width), missing = y.shape, change.missing
    change.bias, change.y = pointers(bias, y)
    change.y_stride, change.width = y.strides[0], width
    down = Program.of("low_rank_down", RECORDS=int(change.records), FINE=int(fine))
    up = Program.of("low_rank_up", OUT=OUT[y.dtype], RECORDS=0)
    launch(y.device, down, (-(-32 * missing // _THREADS), 1, 1), _THREADS, change)
    launch(y.device, up, (rows, -(-width // _THREADS), 1), _THREADS, change)


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


class CudaAdapters:
    """Adds the adapters' changes to products of the current pass.

    ``kind`` is what recordings of passes with adapters depend on: it changes if an adapter changes
    other matrices than those before it, or has more ranks.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.table = _Table(self)
        self.of_rows: list[tuple[slice, Adapter[CudaLowRank]]] = []
        self.tokens: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # of the pass
        self.kind = 1
        self._count = 8  # places of each table
        self._places: dict[Adapter[CudaLowRank], int] = {}  # the latest is the last
        self._tables: dict[tuple[str, ...], tuple[Mapping[str, int], Tensor]] = {}
        self._names: set[str] = set()  # tensors that adapters have changed
        self._rank = 0
        self._rows: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # on the device, in ``_static``
        self._static: Tensor | None = None
        self._places_of_rows: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        """Begin a pass."""
        self.of_rows = adapted_rows(self.table, batch.mixes)
        self.tokens = batch.tokens
        if not self.of_rows:
            return
        self._place([adapter for _, adapter in self.of_rows])
        rows = np.full(max(MOST_ROWS, len(batch.tokens)), -1, np.int32)
        for part, adapter in self.of_rows:
            rows[part] = self._places[adapter]
        rows[len(batch.tokens) :] = rows[len(batch.tokens) - 1]  # those that fill a pass up
        if len(rows) > MOST_ROWS:
            self._places_of_rows = upload(rows, self._device)
            return
        if self._static is None:
            pool = self._device.persistent
            self._static = empty(MOST_ROWS, dtype=INT32, device=self._device, pool=pool)
        if not np.array_equal(rows, self._rows):
            self._static.put(rows)
            self._rows = rows
        self._places_of_rows = self._static

    def recorded_kind(self, batch: Batch) -> int | None:
        """``kind`` for a pass that may be recorded, 0 if it has no adapters; None if the host
        computes a part of them.
        """
        self.begin(batch)
        if any(each.embedding or each.head for _, each in self.of_rows):
            return None
        return self.kind if self.of_rows else 0

    def _place(self, adapters: Sequence[Adapter[CudaLowRank]]) -> None:
        """Give adapters their places in the tables, those of the least recently used ones."""
        wanted = dict.fromkeys(adapters)
        missing = [each for each in wanted if each not in self._places]
        for each in wanted.keys() - set(missing):
            self._places[each] = self._places.pop(each)
        if len(wanted) > self._count:
            self._count = 1 << (len(wanted) - 1).bit_length()
            self._tables.clear()
            self.kind += 1
        for each in missing:
            if len(self._places) >= self._count:
                place = self._places.pop(next(iter(self._places)))
            else:
                place = min(set(range(self._count)) - set(self._places.values()))
            self._places[each] = place
            rank = max((len(low.a) for low in each.matrices.values()), default=0)
            if rank > self._rank or not self._names >= each.matrices.keys():
                self._rank = max(rank, self._rank)
                self._names |= each.matrices.keys()
                self.kind += 1
        if missing:
            for starts, table in self._tables.values():
                table.put(self._changes(starts))

    def forget(self) -> None:
        """Forget the adapters, one of which was removed, so that its memory is freed."""
        self._places.clear()
        self.of_rows = []

    def of(self, x: Tensor | Records, starts: Mapping[str, int]) -> AdaptedRows | None:
        """What changes in the product of x (R, columns) with a matrix whose tensors begin at
        ``starts``; None is nothing.
        """
        if not self.of_rows or self._names.isdisjoint(starts):
            return None
        if tuple(starts) not in self._tables:
            pool = self._device.persistent
            table = upload(self._changes(starts), self._device, pool=pool)
            self._tables[tuple(starts)] = starts, table
        assert self._places_of_rows is not None, "the pass has begun"
        table = self._tables[tuple(starts)][1]
        return adapted_products(table, self._places_of_rows, x, parts=len(starts), rank=self._rank)

    def _changes(self, starts: Mapping[str, int]) -> npt.NDArray[np.uint8]:
        """The table of a matrix: each tensor's changes by all adapters that have places."""
        array = (Change * (len(starts) * self._count))()
        for part, (name, first) in enumerate(starts.items()):
            for adapter, place in self._places.items():
                if (low := adapter.matrices.get(name)) is not None:
                    at, ranks = pointers(low.a, low.b, low.factors), (len(low.a), len(low.b))
                    array[part * self._count + place] = Change(*at, *ranks, first)
        return np.frombuffer(bytes(array), np.uint8)

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
