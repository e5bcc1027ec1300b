"""A tensor as a range of bytes in a file, read by rows.

The one place that turns row numbers into byte offsets, for GGUF and safetensors alike. A row is one
step along the first axis; a vector or scalar is a single row. An expert out of a stacked tensor is
a range too. Knows neither file format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.ranged_file import RangedFile
from localrt.quant.formats import PackedTensor

__all__ = ["RowSource", "StoredTensor", "checked_rows"]


class RowSource(Protocol):
    """A tensor whose rows can be read, however they lie in a file."""

    @property
    def info(self) -> TensorInfo:
        """What it is once read."""

    def read(self, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop``; raises as ``StoredTensor.read`` does."""

    def blocks(self, max_bytes: int) -> Iterator[PackedTensor]:
        """All rows in order, in pieces of at most ``max_bytes`` (and at least one row)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``info`` says what the tensor is; its bytes begin at ``offset`` of ``file``."""

    info: TensorInfo
    file: RangedFile
    offset: int

    @property
    def rows(self) -> int:
        """Steps along the first axis; 1 for a vector."""
        return self.info.shape[0] if len(self.info.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        """Packed bytes of one row."""
        return self.info.nbytes // self.rows if self.rows else 0

    def read(self, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop``, read now.

        Raises:
            ValueError: the tensor has no such rows.
            CheckpointError: the file ends before them, or is closed.
        """
        start, stop = checked_rows(self.info, start, stop)
        rows = stop - start
        data = self.file.read(self.offset + start * self.row_bytes, rows * self.row_bytes)
        shape = (rows, *self.info.shape[1:]) if len(self.info.shape) > 1 else self.info.shape
        return PackedTensor(
            self.info.name, self.info.format, shape, data.reshape(rows, self.row_bytes)
        )

    def row_ranges(self, max_bytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Consecutive ``(start, stop)`` covering all rows, each of at most ``max_bytes`` bytes.

        A range holds a multiple of ``multiple`` rows where that fits, and at least one row.
        """
        step = max(1, max_bytes // max(1, self.row_bytes))
        if step > multiple:
            step -= step % multiple
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def blocks(self, max_bytes: int) -> Iterator[PackedTensor]:
        """All rows in order, in pieces of at most ``max_bytes`` (and at least one row)."""
        for start, stop in self.row_ranges(max_bytes):
            yield self.read(start, stop)


def checked_rows(info: TensorInfo, start: int, stop: int | None) -> tuple[int, int]:
    """A range of a tensor's rows, ``stop`` None meaning its end.

    Raises:
        ValueError: the tensor has no such rows.
    """
    rows = info.shape[0] if len(info.shape) > 1 else 1
    stop = rows if stop is None else stop
    if not 0 <= start <= stop <= rows:
        raise ValueError(f"{info.name!r} has {rows} rows: {start} to {stop} cannot be read")
    return start, stop
