"""A tensor of all experts of a layer, taken apart: each expert's matrix as an ordinary tensor.

Where an expert's rows lie together, it is a range of the file and nothing else: no copy, no reading
of other experts. Where they do not (gpt-oss publishes gate and up in turns, and transposed), its
own bytes are read and put in order. Knows names and shapes; which architecture stacks what is a
table elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.base import RowSource, StoredTensor, TensorInfo
from localrt.models.checkpoints.ranged_file import RangedFile
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.packed import Bytes

_MATRIX = ".weight"


@dataclass(frozen=True, slots=True)
class Stack:
    """What the parts of a stacked tensor are called, below ``model.layers.N.``.

    ``{}`` in a name is the expert's number; with none, the tensor is one matrix. Of two names each
    has half the rows: the first half, or with ``turns`` every second. A ``transposed`` tensor is
    (experts, columns, rows).
    """

    names: tuple[str, ...]
    turns: bool = False
    transposed: bool = False


def split_stack(
    tensor: StoredTensor, stack: Stack, prefix: str, count: int | None
) -> Iterator[RowSource]:
    """Every part of ``tensor`` under its own name; ``count`` is the number of experts, if known.

    Raises:
        CheckpointError: the tensor's shape is not that of so many experts.
    """
    parts = len(stack.names)
    for number, own in enumerate(split_ranges(tensor, stack, prefix, count)):
        part = number % parts
        whole = own.offset - part * own.info.nbytes  # where the expert's own bytes begin
        if stack.turns or (stack.transposed and len(own.info.shape) > 1):
            rows = own.info.shape[0]
            taken = (
                slice(part, None, parts) if stack.turns else slice(part * rows, (part + 1) * rows)
            )
            yield _Interleaved(own.info, tensor.file, whole, taken, parts)
        else:
            yield own


def split_ranges(
    tensor: StoredTensor, stack: Stack, prefix: str, count: int | None
) -> Iterator[StoredTensor]:
    """``split_stack``, taking it that parts lie one after another, as they do in GGUF."""
    info, parts = tensor.info, len(stack.names)
    is_vector = not stack.names[0].endswith(_MATRIX)
    stacked = "{}" in stack.names[0]
    experts = check_stack(info, 2 if is_vector else 3, count) if stacked else 1
    shape = info.shape[1:] if stacked else info.shape
    if len(shape) == 2 and stack.transposed:
        shape = (shape[1], shape[0])
    if shape[0] % parts:
        raise CheckpointError(
            f"tensor {info.name!r} has the shape {info.shape}, which is not {parts} equal matrices"
        )
    shape = (shape[0] // parts, *shape[1:])
    nbytes = info.nbytes // (experts * parts)
    offset = tensor.offset
    for expert in range(experts):
        for name in stack.names:
            own = TensorInfo(prefix + name.format(expert), shape, info.format, nbytes)
            yield StoredTensor(own, tensor.file, offset)
            offset += nbytes


def check_stack(info: TensorInfo, dims: int, count: int | None) -> int:
    """The number of experts in a stacked tensor of ``dims`` dimensions.

    Raises:
        CheckpointError: it has others, or is not for ``count`` experts.
    """
    if len(info.shape) != dims:
        raise CheckpointError(
            f"tensor {info.name!r} has the shape {info.shape}: of all experts of a layer it would "
            f"have {dims} axes"
        )
    if count is not None and info.shape[0] != count:
        raise CheckpointError(
            f"tensor {info.name!r} holds {info.shape[0]} experts, the config says {count}: "
            "download the model again"
        )
    return info.shape[0]


@dataclass(frozen=True, slots=True)
class StackedRows(RowSource):
    """All experts' matrices (experts, rows, columns); ``flat`` has their rows in one matrix."""

    flat: RowSource

    @classmethod
    def of(cls, flat: RowSource, experts: int) -> StackedRows:
        """``flat`` taken apart; its rows are whole experts'."""
        rows, columns = flat.info.shape
        return cls(replace(flat.info, shape=(experts, rows // experts, columns)), flat)

    @property
    def scale(self) -> float:
        return self.flat.scale

    def _read(self, start: int, stop: int) -> Bytes:
        rows = self.info.shape[1]
        return self.flat.read(start * rows, stop * rows).data


def split_rows(
    tensor: RowSource, stack: Stack, prefix: str, count: int | None
) -> Iterator[RowSource]:
    """``split_stack`` of rows that are made of several tensors: ``StackedRows``, or one matrix.

    Raises:
        CheckpointError: the tensor's shape is not that of so many experts, or it is transposed.
    """
    info, parts = tensor.info, len(stack.names)
    experts = check_stack(info, 3, count) if "{}" in stack.names[0] else 1
    flat = tensor.flat if isinstance(tensor, StackedRows) else tensor
    size = flat.info.shape[0] // experts
    if stack.transposed or size % parts:
        raise CheckpointError(
            f"tensor {info.name!r} has the shape {info.shape}, which is not {parts} equal matrices "
            "whose rows are quantized"
        )
    rows = size // parts
    own = replace(info, shape=(rows, info.shape[-1]), nbytes=info.nbytes // (experts * parts))
    for expert in range(experts):
        for part, name in enumerate(stack.names):
            first = expert * size + (part if stack.turns else part * rows)
            named = replace(own, name=prefix + name.format(expert))
            yield _SomeRows(named, flat, first, parts if stack.turns else 1)


@dataclass(frozen=True, slots=True)
class _SomeRows(RowSource):
    """Rows ``first``, ``first + step``, ... of ``whole``."""

    whole: RowSource
    first: int
    step: int

    @property
    def scale(self) -> float:
        return self.whole.scale

    def _read(self, start: int, stop: int) -> Bytes:
        first, last = self.first + start * self.step, self.first + (stop - 1) * self.step
        return self.whole.read(first, last + 1).data[:: self.step]


@dataclass(frozen=True, slots=True)
class _Interleaved(RowSource):
    """A matrix whose rows are the ``taken`` columns of one at ``offset``, ``parts`` times as large.

    Or a vector of every such value. A row's values are as far apart as the file's rows are long, so
    the whole matrix is read for any of them; ``blocks`` reads it once.
    """

    file: RangedFile
    offset: int
    taken: slice
    parts: int

    def _read(self, start: int, stop: int) -> Bytes:
        columns = self.info.shape[1] if len(self.info.shape) > 1 else 1
        data = self.file.read(self.offset, self.info.nbytes * self.parts)
        values = data.reshape(columns, -1, self.info.format.block_bytes)
        own = values[:, self.taken].swapaxes(0, 1)  # (rows or values, columns, bytes)
        return np.ascontiguousarray(own[start:stop] if len(self.info.shape) > 1 else own)

    def blocks(self, max_bytes: int) -> Iterator[PackedTensor]:
        """All rows in order, in pieces."""
        whole = self.read()
        for start, stop in self._row_ranges(max_bytes):
            yield self._packed(whole.data[start:stop], stop - start)
