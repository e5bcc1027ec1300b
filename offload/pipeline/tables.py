"""Tables of which passes need rows: from RAM where they are, else from the SSD.

The embedding's tiles hold 16 rows; those with a wanted row are read, each once, and the latest are
kept: text repeats its words. The table of hashed n-grams has hundreds of millions of small rows,
far apart: each is a read of its page, asked for where a pass begins and taken by its layer, with
many reads under way at once. It knows rows by number, not what they mean.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.weight_store import Check
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.reader import wait_for_all
from localrt.offload.ring import PAGE
from localrt.quant.formats.packed import Bytes
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor, padded_rows
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import Array, Ops, Pass, Weight
from localrt.quant.ops.streams import rows_of_tokens

Ids = npt.NDArray[np.int64]
_READS_AT_ONCE = 16  # reads of one page wait for the disk, not for a core
_LEAST = 2  # rows of a thread: waking one takes as long as part of a read


@dataclass(frozen=True, slots=True)
class RowRange:
    """So many rows of the table, one behind the other from byte ``offset`` of ``file`` on."""

    file: str
    offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Pages:
    """Bytes ``first`` to ``last`` of ``file``, the ``rows`` asked for that they hold, and where in
    them each begins.
    """

    file: str
    first: int
    last: int
    rows: list[int]
    places: list[int]


class RowsAhead:
    """Rows on their way. ``take`` waits for them; ``cancel`` if nobody wants them any more."""

    def __init__(
        self, reads: Sequence[Future[None]], data: Bytes, which: Ids | None, stall_s: float
    ):
        self._reads, self._data, self._which, self._stall_s = reads, data, which, stall_s

    def take(self, check: Check | None = None) -> Bytes:
        """The rows, (R, bytes of a row). ``check`` is called while waiting, and may raise.

        Raises:
            CheckpointError: the file fails, or the disk does not answer.
        """
        wait_for_all(self._reads, "rows of a table", self._stall_s, check)
        return self._data if self._which is None else self._data[self._which]

    def cancel(self) -> None:
        """Leave out the reads that have not begun."""
        for read in self._reads:
            read.cancel()


class ScatteredRows:
    """A table of rows of ``row_bytes``, in ``parts`` of ``files`` one after the other.

    ``stall_s``: how long a disk may be silent.
    """

    def __init__(
        self,
        files: StoreFiles,
        parts: Sequence[RowRange],
        row_bytes: int,
        *,
        stall_s: float = 60.0,
    ) -> None:
        self._files, self._parts, self._row_bytes = files, parts, row_bytes
        self._stall_s = stall_s
        self._ends = np.cumsum([part.rows for part in parts])
        self._firsts = self._ends - [part.rows for part in parts]
        self._offsets = np.array([part.offset for part in parts], np.int64)
        self.bytes_read = 0
        """From the files, so far: whole pages."""
        self._counting = Lock()
        self._pool = ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="localrt-ngrams")

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self._ends[-1])

    def ask(self, rows: Ids) -> RowsAhead:
        """Begin to read ``rows`` (R,), each once."""
        wanted, which = np.unique(rows, return_inverse=True)
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < self.rows:
            bounds = f"{wanted[0]} to {wanted[-1]}"
            raise ValueError(f"rows must be from 0 to {self.rows - 1}, are from {bounds}")
        data = np.empty((len(wanted), self._row_bytes), np.uint8)
        pages = self._pages(wanted)
        shares = min(_READS_AT_ONCE, -(-len(pages) // _LEAST))
        edges = [n * len(pages) // shares for n in range(shares + 1)] if shares else []
        reads = [
            self._pool.submit(self._read, pages[first:last], data)
            for first, last in pairwise(edges)
        ]
        repeated = None if np.array_equal(wanted, rows) else which.reshape(-1)
        return RowsAhead(reads, data, repeated, self._stall_s)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _pages(self, rows: Ids) -> list[_Pages]:
        """Where ``rows`` lie, in rising order; those of the same pages are read together."""
        numbers = np.searchsorted(self._ends, rows, side="right")
        starts = self._offsets[numbers] + (rows - self._firsts[numbers]) * self._row_bytes
        ends = starts + self._row_bytes
        firsts, lasts = starts // PAGE * PAGE, -(-ends // PAGE) * PAGE
        found: list[_Pages] = []
        before: tuple[int, int, int] | None = None
        places = zip(*(part.tolist() for part in (numbers, firsts, lasts, starts)), strict=True)
        for row, (number, first, last, start) in enumerate(places):
            if before != (number, first, last):
                found.append(_Pages(self._parts[number].file, first, last, [], []))
                before = number, first, last
            found[-1].rows.append(row)
            found[-1].places.append(start - first)
        return found

    def _read(self, pages: Sequence[_Pages], out: Bytes) -> None:
        width, total = self._row_bytes, 0
        room = aligned_buffer(max(each.last - each.first for each in pages))
        for each in pages:
            size = each.last - each.first
            self._files.read_into(each.file, each.first, room[:size], each.places[-1] + width)
            total += size
            for row, at in zip(each.rows, each.places, strict=True):
                out[row] = room[at : at + width]
        with self._counting:
            self.bytes_read += total


KEPT_BYTES = 1 << 20
"""Of tiles that were read, at most."""
_PARALLEL = 8  # reads of a few kilobytes wait for the disk, not for a core


class RowTable:
    """Matrix ``name`` of ``store``, in one unit or in slices.

    ``resident`` gives the bytes of a unit that is in RAM, or None; others are read from ``files``.
    ``stall_s``: how long a disk may be silent.
    """

    def __init__(
        self,
        store: StoreCheckpoint,
        name: str,
        files: StoreFiles,
        resident: Callable[[str], Any | None],
        *,
        stall_s: float = 60.0,
    ) -> None:
        self._parts = sorted(
            (
                (tensor.row, unit, tensor)
                for unit in store.manifest.units
                for tensor in unit.tensors
                if tensor.name == name
            ),
            key=lambda part: part[0],
        )
        self._first_rows = [row for row, _, _ in self._parts]
        tensor = self._parts[0][2]
        self._name, self._format, self._scale = name, tensor.format, tensor.scale
        self._columns = tensor.shape[1]
        self._rows = sum(tensor.shape[0] for _, _, tensor in self._parts)
        self._tile = TILE_ROWS * tensor.format.row_bytes(self._columns)
        self._files = files
        self._resident = resident
        self._stall_s = stall_s
        self._table: tuple[Bytes, Weight] | None = None  # all of it, if it is resident
        self._kept: OrderedDict[int, Bytes] = OrderedDict()  # tiles, the latest last
        self._pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="localrt-rows")

    def embed(
        self,
        ops: Ops,
        step: Pass,
        tokens: npt.NDArray[np.int64],
        scale: float,
        check: Callable[[], None] | None = None,
        *,
        each: int = 1,
    ) -> Array:
        """The rows of ``tokens``, (R, D). ``check`` is called while waiting, and may raise.

        With ``each`` a token has so many: see ``Ops.embed``.

        Raises:
            CheckpointError: the file fails, or the disk does not answer.
        """
        if len(self._parts) == 1 and (data := self._resident(self._parts[0][1].name)) is not None:
            return ops.embed(self._whole(ops, data), step, scale, tokens=tokens, each=each)
        if each > 1:
            tokens = rows_of_tokens(tokens, each, self._rows)
        tiles, where = np.unique(tokens // TILE_ROWS, return_inverse=True)
        data = np.empty(len(tiles) * self._tile, np.uint8)
        missing = [
            n for n, tile in enumerate(tiles) if not self._copy(int(tile), self._at(data, n))
        ]

        def read(index: int) -> None:
            self._read(int(tiles[index]), self._at(data, index))

        if missing:
            reads = [self._pool.submit(read, index) for index in missing]
            wait_for_all(reads, self._name, self._stall_s, check)
            self._keep({int(tiles[index]): self._at(data, index) for index in missing})
        shape = (len(tiles) * TILE_ROWS, self._columns)
        table = ops.weight(shape, [TiledTensor(self._name, self._format, shape, data, self._scale)])
        local = where.reshape(-1) * TILE_ROWS + tokens % TILE_ROWS
        return ops.embed(table, step, scale, tokens=local)

    def _whole(self, ops: Ops, data: Bytes) -> Weight:
        """The table where it lies, all of it."""
        if self._table is None or self._table[0] is not data:
            _, _, tensor = self._parts[0]
            shape = (tensor.shape[0], self._columns)
            tiles = data[tensor.offset : tensor.offset + tensor.nbytes]
            block = TiledTensor(self._name, self._format, shape, tiles, self._scale)
            self._table = data, ops.weight(shape, [block])
        return self._table[1]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _at(self, data: Bytes, index: int) -> Bytes:
        return data[index * self._tile : (index + 1) * self._tile]

    def _locate(self, tile: int) -> tuple[int, int]:
        """The part that holds a tile, and the byte of its unit at which it begins."""
        row = tile * TILE_ROWS
        part = bisect_right(self._first_rows, row) - 1
        first, _, tensor = self._parts[part]
        return part, tensor.offset + (row - first) // TILE_ROWS * self._tile

    def _keep(self, read: Mapping[int, Bytes]) -> None:
        """Copies of the tiles that were read, in the place of the oldest."""
        room = KEPT_BYTES // self._tile
        for tile, data in list(read.items())[:room]:
            self._kept[tile] = data.copy()
        while len(self._kept) > room:
            self._kept.popitem(last=False)

    def _copy(self, tile: int, out: Bytes) -> bool:
        kept = self._kept.get(tile)
        if kept is not None:
            self._kept.move_to_end(tile)
            out[:] = kept
            return True
        part, start = self._locate(tile)
        data = self._resident(self._parts[part][1].name)
        if data is None:
            return False
        out[:] = data[start : start + self._tile]
        return True

    def _read(self, tile: int, out: Bytes) -> None:
        part, start = self._locate(tile)
        unit = self._parts[part][1]
        self._files.read_into(unit.file, unit.offset + start, out)


class NgramTable:
    """Matrix ``name`` of ``store``, all of it in one unit.

    ``resident`` gives the bytes of a unit that is in RAM, or None; others are read from ``files``.
    ``stall_s``: how long a disk may be silent.
    """

    def __init__(
        self,
        store: StoreCheckpoint,
        name: str,
        files: StoreFiles,
        resident: Callable[[str], Any | None],
        *,
        stall_s: float = 60.0,
    ) -> None:
        self._unit, self._tensor = next(
            (unit, tensor)
            for unit in store.manifest.units
            for tensor in unit.tensors
            if tensor.name == name
        )
        rows, columns = self._tensor.shape
        self._shape = rows, columns
        self._resident = resident
        self._table: Weight | None = None  # all of it, if it is resident
        tile_bytes = TILE_ROWS * self._tensor.format.row_bytes(columns)
        tiles = RowRange(
            self._unit.file,
            self._unit.offset + self._tensor.offset,
            padded_rows(rows) // TILE_ROWS,
        )
        self._tiles = ScatteredRows(files, [tiles], tile_bytes, stall_s=stall_s)

    @property
    def bytes_read(self) -> int:
        """From the SSD, so far."""
        return self._tiles.bytes_read

    def ask(self, ops: Ops, step: Pass, rows: Ids, check: Check | None) -> Callable[[], Array]:
        """What gives ``rows`` (R,) as ``ops`` has them, (R, columns): they are on their way.

        ``check`` is called while waiting, and may raise.

        Raises:
            CheckpointError: from what is returned: the file fails, or the disk does not answer.
        """
        if (data := self._resident(self._unit.name)) is not None:
            table = self._whole(ops, data)
            return lambda: ops.embed(table, step, tokens=rows)
        tiles, where = np.unique(rows // TILE_ROWS, return_inverse=True)
        ahead = self._tiles.ask(tiles)

        def take() -> Array:
            table = ops.weight(
                (len(tiles) * TILE_ROWS, self._shape[1]),
                [self._tiled(len(tiles) * TILE_ROWS, ahead.take(check).reshape(-1))],
            )
            return ops.embed(table, step, tokens=where.reshape(-1) * TILE_ROWS + rows % TILE_ROWS)

        return take

    def close(self) -> None:
        """End the threads."""
        self._tiles.close()

    def _whole(self, ops: Ops, data: Bytes) -> Weight:
        """The table where it lies."""
        if self._table is None:
            first = self._tensor.offset
            tiles = data[first : first + self._tensor.nbytes]
            self._table = ops.weight(self._shape, [self._tiled(self._shape[0], tiles)])
        return self._table

    def _tiled(self, rows: int, data: Bytes) -> TiledTensor:
        tensor = self._tensor
        shape = rows, self._shape[1]
        return TiledTensor(tensor.name, tensor.format, shape, data, tensor.scale)
