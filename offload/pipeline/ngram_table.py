"""The table of hashed n-grams of a store: rows asked for where a pass begins, taken by their layer.

Passes go on while the SSD answers. It knows one matrix of a store, not what its rows mean; a row is
read with the tile that it lies in, which is smaller than a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.residency import Check
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.scattered_rows import RowRange, ScatteredRows
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor, padded_rows
from localrt.quant.ops.protocol import Array, Ops, Pass, Weight

__all__ = ["NgramTable"]

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


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
