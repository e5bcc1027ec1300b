"""Rows of a table that is never in memory, far apart in its files, asked for ahead.

The table of hashed n-grams has hundreds of millions of rows of some hundred bytes, and neighbours
in a text have nothing in common there: each row is a read of its page. Threads have many of them on
their way at once, as disks want it, and keep a row, not its page. It knows rows by number, not what
they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock

import numpy as np
import numpy.typing as npt

from localrt.models.residency import Check
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.reader import wait_for_all
from localrt.offload.ring import PAGE
from localrt.quant.ops.arrays import aligned_buffer

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

_PARALLEL = 16  # reads of one page wait for the disk, not for a core
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
        self._pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="localrt-ngrams")

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
        shares = min(_PARALLEL, -(-len(pages) // _LEAST))
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
