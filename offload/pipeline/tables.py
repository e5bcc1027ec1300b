"""Tables that passes read by row: from RAM if resident, else from the SSD.

They are the embedding, per-layer inputs, and hashed n-grams. A tile holds 16 rows. Each needed tile
is read once, with many reads in flight; tiles in the same pages are read together. Recent tiles are
cached, since words recur in a text.
"""

from __future__ import annotations

import time
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from threading import Lock

import numpy as np
import numpy.typing as npt

from localrt.common.files import PAGE
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit, UnitTensor
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.reader import POLL_S, require_answer
from localrt.quant.formats.packed import Bytes
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor
from localrt.quant.ops.arrays import Hidden, Pass, Weight, aligned_buffer
from localrt.quant.ops.protocol import Check, Ops
from localrt.quant.ops.streams import rows_of_tokens

Ids = npt.NDArray[np.int64]
CACHE_BYTES = 1 << 20
"""The size of the tile cache in bytes."""
_READS_AT_ONCE = 16  # threads, since small reads wait for the disk, not for a core
_READS_PER_THREAD = 2  # at least, since waking a thread costs a part of a read's time


_Pages = tuple[str, int, int]
"""A range of whole pages: file, first byte, last byte."""


class RowTable:
    """Matrix ``name`` of ``store``, in one unit or in slices.

    ``resident`` gives the bytes of a unit in RAM, or None; other units are read from ``files``. If
    a tile is damaged, its whole unit is read, and ``repair`` makes it again or raises.
    ``cache_bytes`` is the size of the tile cache. ``stall_s`` is how many seconds a disk may take
    to answer.
    """

    def __init__(
        self,
        store: StoreCheckpoint,
        name: str,
        files: StoreFiles,
        resident: Callable[[str], Bytes | None],
        repair: Callable[[StoredUnit, Bytes], None],
        *,
        cache_bytes: int = CACHE_BYTES,
        stall_s: float = 60.0,
    ) -> None:
        slices = (
            (unit, tensor)
            for unit in store.manifest.units
            for tensor in unit.tensors
            if tensor.name == name
        )
        self._slices = sorted(slices, key=lambda piece: piece[1].row)
        self._tensor = tensor = self._slices[0][1]
        self._columns = tensor.shape[1]
        self._rows = sum(tensor.shape[0] for _, tensor in self._slices)
        self._tile = TILE_ROWS * tensor.format.row_bytes(self._columns)
        self._files = files
        self._resident = resident
        self._repair = repair
        self._sums = {
            unit.name: np.frombuffer(bytes.fromhex(unit.tile_sums), ">u4")
            for unit, _ in self._slices
        }
        self._stall_s = stall_s
        self._table: tuple[Bytes, Weight] | None = None  # the whole table, if resident
        self._cache: OrderedDict[int, Bytes] = OrderedDict()  # the most recent last
        self._cache_tiles = cache_bytes // self._tile
        self.bytes_read = 0
        """Bytes of whole pages read from the SSD so far."""
        self._counting = Lock()
        self._pool = ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="localrt-rows")

    def begin_read(
        self,
        ops: Ops,
        step: Pass,
        rows: Ids,
        check: Check | None = None,
        *,
        scale: float = 1.0,
        each: int = 1,
    ) -> Callable[[], Hidden]:
        """Begin to read ``rows`` (R,); return a function that waits and returns them as arrays of
        ``ops``, times ``scale``.

        ``each`` is the rows per token: see ``Ops.embed``. ``check`` is called while waiting, and
        may raise.

        Raises:
            CheckpointError: raised by the returned function if the file fails or the disk does not
            answer.
        """
        if len(self._slices) == 1 and (data := self._resident(self._slices[0][0].name)) is not None:
            table = self._whole(ops, data)
            return lambda: ops.embed(table, step, scale, tokens=rows, each=each)
        if each > 1:
            rows = rows_of_tokens(rows, each, self._rows)
        tiles, where = np.unique(rows // TILE_ROWS, return_inverse=True)
        data = np.empty((len(tiles), self._tile), np.uint8)
        missing = [n for n, tile in enumerate(tiles.tolist()) if not self._copy(tile, data[n])]
        tiles_by_pages: dict[_Pages, list[tuple[Bytes, int, int]]] = {}
        for n, (pages, at) in zip(missing, self._pages(tiles[missing].tolist()), strict=True):
            tiles_by_pages.setdefault(pages, []).append((data[n], at, int(tiles[n])))
        reads_by_pages = list(tiles_by_pages.items())
        shares = min(_READS_AT_ONCE, -(-len(reads_by_pages) // _READS_PER_THREAD))
        edges = [n * len(reads_by_pages) // shares for n in range(shares + 1)] if shares else []
        reads = [self._pool.submit(self._read, reads_by_pages[a:b]) for a, b in pairwise(edges)]

        def take() -> Hidden:
            _wait_for_all(reads, f"rows of {self._tensor.name}", self._stall_s, check)
            for n in missing[: self._cache_tiles]:
                self._cache[int(tiles[n])] = data[n].copy()
            while len(self._cache) > self._cache_tiles:
                self._cache.popitem(last=False)
            table = self._weight(ops, len(tiles) * TILE_ROWS, data.reshape(-1))
            local = where.reshape(-1) * TILE_ROWS + rows % TILE_ROWS
            return ops.embed(table, step, scale, tokens=local)

        return take

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _whole(self, ops: Ops, data: Bytes) -> Weight:
        """The whole table as a weight that uses the bytes in place."""
        if self._table is None or self._table[0] is not data:
            tensor = self._tensor
            tiles = data[tensor.offset : tensor.offset + tensor.nbytes]
            self._table = data, self._weight(ops, tensor.shape[0], tiles)
        return self._table[1]

    def _weight(self, ops: Ops, rows: int, data: Bytes) -> Weight:
        tensor, shape = self._tensor, (rows, self._columns)
        return ops.weight(
            shape, [TiledTensor(tensor.name, tensor.format, shape, data, tensor.scale)]
        )

    def _locate(self, tile: int) -> tuple[StoredUnit, int]:
        """The unit that holds a tile, and the tile's offset in it."""
        row = tile * TILE_ROWS
        unit, tensor = self._slices[bisect_right(self._slices, row, key=_first_row) - 1]
        return unit, tensor.offset + (row - tensor.row) // TILE_ROWS * self._tile

    def _check(self, tile: int, out: Bytes) -> None:
        """Compare a tile that was read with its sum, if the store has sums, and repair it."""
        unit, start = self._locate(tile)
        sums = self._sums[unit.name]
        if (
            sums.size
            and zlib.crc32(out.data) != sums[(start - unit.tensors[0].offset) // self._tile]
        ):
            whole = aligned_buffer(unit.nbytes)
            self._files.read_into(unit.file, unit.offset, whole)
            if not unit.is_whole(whole):
                self._repair(unit, whole)
            out[:] = whole[start : start + self._tile]

    def _copy(self, tile: int, out: Bytes) -> bool:
        """Copy a tile if it is in memory; returns whether it was."""
        if (tile_bytes := self._cache.get(tile)) is not None:
            self._cache.move_to_end(tile)
            out[:] = tile_bytes
            return True
        unit, start = self._locate(tile)
        if (data := self._resident(unit.name)) is None:
            return False
        out[:] = data[start : start + self._tile]
        return True

    def _pages(self, tiles: Sequence[int]) -> Iterator[tuple[_Pages, int]]:
        """Each tile's pages in the files, and its offset within them."""
        for tile in tiles:
            unit, start = self._locate(tile)
            start += unit.offset
            first = start // PAGE * PAGE
            yield (unit.file, first, -(-(start + self._tile) // PAGE) * PAGE), start - first

    def _read(self, reads: Sequence[tuple[_Pages, list[tuple[Bytes, int, int]]]]) -> None:
        buffer = aligned_buffer(max(last - first for (_, first, last), _ in reads))
        for (file, first, last), tiles in reads:
            self._files.read_into(file, first, buffer[: last - first])
            for out, at, tile in tiles:
                out[:] = buffer[at : at + self._tile]
                self._check(tile, out)
            with self._counting:
                self.bytes_read += last - first


def _first_row(piece: tuple[StoredUnit, UnitTensor]) -> int:
    return piece[1].row


def _wait_for_all(
    reads: Sequence[Future[None]], what: str, stall_s: float, check: Check | None = None
) -> None:
    """Wait until all ``reads`` are done, with a timeout to detect a disk that hangs.

    Raises:
        CheckpointError: one failed, or none of them ends for ``stall_s`` seconds.
    """
    latest, count = time.perf_counter(), 0
    try:
        while True:
            done, pending = wait(reads, POLL_S, FIRST_EXCEPTION)
            for read in done:
                read.result()
            if not pending:
                return
            if len(done) > count:
                latest, count = time.perf_counter(), len(done)
            require_answer(latest, stall_s, what)
            if check is not None:
                check()
    finally:
        for read in reads:
            read.cancel()
