"""Whole numbers that are packed along columns or rows of a transposed matrix: GPTQ and AWQ.

The files keep a matrix as (columns, rows): what is a row here is a column there. Some thousand rows
are read at a time, from a stretch of each of the file's rows, so that reading goes on quickly while
little is held.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from localrt.models.checkpoints.published.bits import read_columns
from localrt.models.checkpoints.published.coded_rows import CodedRows, Floats, symmetric_scales
from localrt.models.checkpoints.stored_tensor import Bytes, StoredTensor
from localrt.quant.formats import F32, PackedTensor, unpack

__all__ = ["ColumnRows"]

_STRETCH = 4 << 20  # bytes of words read at a time, or of numbers made of them


@dataclass(frozen=True, slots=True)
class ColumnRows(CodedRows):
    """Rows of ``words``, ``scales`` (groups, rows) and ``zeros``, of ``bits``.

    ``order`` has each column's group where groups are not ``group`` columns one after another.
    """

    words: StoredTensor
    scales: StoredTensor
    bits: int
    group: int
    order: tuple[int, ...] | None

    def blocks(self, max_bytes: int) -> Iterator[PackedTensor]:
        """All rows in order, in pieces."""
        row_bytes = self.words.info.nbytes // max(1, self.rows)
        if self.info.format == F32:
            row_bytes = self.row_bytes
        stretch = max(32, _STRETCH // max(1, row_bytes) // 32 * 32)
        step = max(1, max_bytes // max(1, self.row_bytes))
        for begin in range(0, self.rows, stretch):
            whole = self.read(begin, min(begin + stretch, self.rows))
            for start in range(0, len(whole.data), step):
                piece = whole.data[start : start + step]
                yield self._packed(piece, len(piece))

    @abstractmethod
    def _zeros(self, start: int, stop: int) -> Bytes | None:
        """Zero points (groups, rows); None where they are the middle of the range."""

    def _scales(self, start: int, stop: int) -> Floats:
        columns = self.info.shape[1]
        found = read_columns(self.scales, start, stop)  # (groups, rows, bytes)
        flat = PackedTensor(
            "", self.scales.info.format, found.shape[:2], found.reshape(len(found), -1)
        )
        scales = np.ascontiguousarray(unpack(flat).T)  # (rows, groups)
        zeros = self._zeros(start, stop)
        if zeros is None:
            pairs = symmetric_scales(self.codec, scales, self.bits)
        else:
            pairs = np.stack([scales, zeros.T.astype(np.float32)], axis=-1)
        if self.order is not None:
            return pairs[:, list(self.order)]
        block = self.codec.format.block
        return pairs[:, np.arange(0, columns, block) // self.group]
