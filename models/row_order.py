"""Reorders rows whose order in a file differs: experts, rotary pairs, groups.

A tensor of all experts of a layer is split. If an expert's rows are contiguous, the expert is a
range of the file. Otherwise (gpt-oss interleaves gate and up, transposed) its bytes are read and
reordered. llama.cpp rotates adjacent pairs of a head's elements, Hugging Face its two halves: whole
packed rows are moved, which changes no value. ggml's NVFP4 has the scales of four groups before
their nibbles, localrt's each scale before its group. TQ1_0 packs five base-3 digits in a byte; it
is converted to 2-bit codes, a fifth larger.

Works from names and shapes; other modules list what each architecture stacks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError
from localrt.models.raw_config import positive_number
from localrt.models.tensor_source import (
    DerivedRows,
    RangedFile,
    RowSource,
    StoredTensor,
    TensorInfo,
)
from localrt.quant.formats import F32, GGML_UNREAD, NVFP4, TQ2_0, Format, PackedTensor, unpack
from localrt.quant.formats.packed import Bytes

_MATRIX = ".weight"


@dataclass(frozen=True, slots=True)
class Stack:
    """The names of a stacked tensor's parts, below ``model.layers.N.``.

    ``{}`` in a name is the expert's number; without it, the tensor is one matrix. Two names share
    the rows: each has a half, or with ``turns`` every other row. A ``transposed`` tensor is
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
        CheckpointError: the tensor's shape does not fit ``count`` experts.
    """
    parts = len(stack.names)
    for number, own in enumerate(split_ranges(tensor, stack, prefix, count)):
        part = number % parts
        whole = own.offset - part * own.info.nbytes  # the offset of the expert's bytes
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
    """``split_stack`` for consecutive parts, as in GGUF."""
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
            yield replace(tensor, info=own, offset=offset)
            offset += nbytes


def check_stack(info: TensorInfo, dims: int, count: int | None) -> int:
    """Return the number of experts in a stacked tensor of ``dims`` dimensions.

    Raises:
        CheckpointError: the shape has other dimensions, or does not fit ``count`` experts.
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
class StackedRows(DerivedRows):
    """All experts' matrices (experts, rows, columns), from their rows in one matrix, ``whole``."""

    @classmethod
    def of(cls, flat: RowSource, experts: int) -> StackedRows:
        """Split ``flat`` into experts of whole rows."""
        rows, columns = flat.info.shape
        return cls(replace(flat.info, shape=(experts, rows // experts, columns)), flat)

    def _read(self, start: int, stop: int) -> Bytes:
        rows = self.info.shape[1]
        return self.whole.read(start * rows, stop * rows).data


def split_rows(
    tensor: RowSource, stack: Stack, prefix: str, count: int | None
) -> Iterator[RowSource]:
    """``split_stack`` for rows from several tensors: ``StackedRows``, or one matrix.

    Raises:
        CheckpointError: the tensor's shape does not fit ``count`` experts, or it is transposed.
    """
    info, parts = tensor.info, len(stack.names)
    experts = check_stack(info, 3, count) if "{}" in stack.names[0] else 1
    flat = tensor.whole if isinstance(tensor, StackedRows) else tensor
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
class _SomeRows(DerivedRows):
    """Rows ``first``, ``first + step``, ... of ``whole``."""

    first: int
    step: int

    def _read(self, start: int, stop: int) -> Bytes:
        first, last = self.first + start * self.step, self.first + (stop - 1) * self.step
        return self.whole.read(first, last + 1).data[:: self.step]


@dataclass(frozen=True, slots=True)
class _Interleaved(RowSource):
    """The ``taken`` columns, as rows, of a matrix ``parts`` times as large at ``offset``.

    Or a vector of such values. A row's values are one file row apart, so reading any row reads the
    whole matrix; ``blocks`` reads it once.
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


_TURNED = ("self_attn.q_proj", "self_attn.k_proj")


def rotary_rows(
    stored: Mapping[str, RowSource], config: Mapping[str, object], path: Path
) -> dict[str, RowSource]:
    """All query and key tensors of a model at ``path``, with pairs reordered to halves, as far as
    heads are rotated.

    Raises:
        CheckpointError: a tensor's rows do not form heads of an even size.
    """
    queries = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads") or queries
    share = positive_number(config.get("partial_rotary_factor")) or 1.0
    found: dict[str, RowSource] = {}
    for name, tensor in stored.items():
        stem = name.rpartition(".")[0]
        if not stem.endswith(_TURNED):
            continue
        heads = queries if stem.endswith(_TURNED[0]) else keys
        found[name] = in_halves(tensor, heads, path, share)
    return found


def in_halves(tensor: RowSource, heads: object, path: Path, share: float = 1.0) -> RowSource:
    """A query or key tensor of ``heads``, with pairs reordered to halves in the first ``share`` of
    each head.

    Raises:
        CheckpointError: its rows do not form heads of an even size.
    """
    info = tensor.info
    if type(heads) is not int or heads < 1 or info.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{path}: {info.shape[0]} rows of {info.name!r} are not {heads!r:.60} heads "
            "of an even size"
        )
    if len(info.shape) == 1 and info.format.block != 1:
        raise CheckpointError(f"{path}: {info.name!r} is a vector in {info.format.name}")
    turned = int(info.shape[0] // heads * min(share, 1.0) + 1e-6)
    return _RotaryRows(info, tensor, heads, turned // 2)


@dataclass(frozen=True, slots=True)
class _RotaryRows(DerivedRows):
    """The rows of ``whole``, a matrix or vector of ``heads``, with the first ``pairs`` of each head
    reordered to halves.
    """

    heads: int
    pairs: int

    @property
    def rows_together(self) -> int:
        """Rows per head: whole heads are read, so that no row is read twice."""
        return max(1, self.rows // self.heads)

    def _read(self, start: int, stop: int) -> Bytes:
        size = self.info.shape[0] // self.heads
        if len(self.info.shape) == 1:
            data = self.whole.read(start, stop).data
            return self._halves(data.reshape(-1, size, self.info.format.block_bytes))
        first = start // size * size
        data = self.whole.read(first, -(-stop // size) * size).data
        rows = self._halves(data.reshape(-1, size, self.row_bytes)).reshape(-1, self.row_bytes)
        return rows[start - first : stop - first]

    def _halves(self, rows: Bytes) -> Bytes:
        """The rows of whole heads (heads, size, bytes)."""
        turned = 2 * self.pairs
        parts = [rows[:, 0:turned:2], rows[:, 1:turned:2], rows[:, turned:]]
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True, slots=True)
class JoinedRows(RowSource):
    """Concatenated rows (or vectors) of ``parts``, which end before the row numbers ``ends``;
    ``factor`` is their scale.
    """

    parts: tuple[RowSource, ...]
    ends: tuple[int, ...]
    factor: float

    @property
    def scale(self) -> float:
        return self.factor

    def _read(self, start: int, stop: int) -> Bytes:
        pieces = []
        stop = stop if len(self.info.shape) > 1 else self.ends[-1]
        while start < stop:
            number = bisect_right(self.ends, start)
            begin = self.ends[number] - self.parts[number].rows
            last = min(stop, self.ends[number])
            pieces.append(self.parts[number].read(start - begin, last - begin).data)
            start = last
        return np.concatenate(pieces)


@dataclass(frozen=True, slots=True, eq=False)
class OrderedColumns(RowSource):
    """The concatenated columns of ``parts``, reordered by ``order``; their format has no blocks."""

    parts: tuple[RowSource, ...]
    order: npt.NDArray[np.int64]

    def _read(self, start: int, stop: int) -> Bytes:
        shape = stop - start, -1, self.info.format.block_bytes
        values = [part.read(start, stop).data.reshape(shape) for part in self.parts]
        return np.ascontiguousarray(np.concatenate(values, axis=1)[:, self.order])


def without_one(source: RowSource) -> RowSource:
    """A norm's weights minus 1, in float32."""
    info = source.info
    return _WithoutOne(replace(info, format=F32, nbytes=4 * math.prod(info.shape)), source)


@dataclass(frozen=True, slots=True)
class _WithoutOne(DerivedRows):
    """The values of ``whole`` minus 1."""

    def _read(self, start: int, stop: int) -> Bytes:
        return (unpack(self.whole.read(start, stop)) - np.float32(1)).view(np.uint8)


def regrouped(source: RowSource, *, integers: bool = False) -> RowSource:
    """``source``, converted exactly if localrt does not compute in its format; ``integers``: they
    are below 2**24, and become float32.
    """
    known = {**_FORMATS, **_INTEGERS} if integers else _FORMATS
    found = known.get(source.info.format)
    if found is None or not source.info.shape:
        return source
    format_, convert = found
    info = source.info
    nbytes = math.prod(info.shape[:-1]) * format_.row_bytes(info.shape[-1])
    info = replace(info, format=format_, nbytes=nbytes)
    return _Regrouped(info, source, convert)


@dataclass(frozen=True, slots=True)
class _Regrouped(DerivedRows):
    """Rows of ``whole``, converted block by block."""

    convert: Callable[[Bytes], Bytes]

    @property
    def rows_together(self) -> int:
        return self.whole.rows_together

    def _read(self, start: int, stop: int) -> Bytes:
        data = self.whole.read(start, stop).data
        return self.convert(data.reshape(-1, self.whole.info.format.block_bytes))


def _nvfp4(blocks: Bytes) -> Bytes:
    """(n, 36) to (4 n, 9). ggml's scales have no sign, and their largest code means 0."""
    scales = blocks[:, :4] & 127
    scales[scales == 127] = 0
    return np.concatenate([scales.reshape(-1, 1), blocks[:, 4:].reshape(-1, 8)], axis=1)


def _tq2_0(blocks: Bytes) -> Bytes:
    """(n, 54) to (n, 66)."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    digits = [
        ((part[:, None] * powers[:count]).astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1)
        for part, count in parts
    ]
    codes = np.concatenate(digits, axis=1).astype(np.uint8).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    pairs = np.bitwise_or.reduce(codes << shifts, axis=2).reshape(-1, 64)
    return np.concatenate([pairs, blocks[:, 52:]], axis=1)


_FORMATS: Mapping[Format, tuple[Format, Callable[[Bytes], Bytes]]] = MappingProxyType(
    {GGML_UNREAD[34]: (TQ2_0, _tq2_0), GGML_UNREAD[40]: (NVFP4, _nvfp4)}
)
_INTEGERS: Mapping[Format, tuple[Format, Callable[[Bytes], Bytes]]] = {
    Format("i64", 1, 8): (F32, lambda n: n.view("<i8").astype("<f4").view(np.uint8)),
    Format("i32", 1, 4): (F32, lambda n: n.view("<i4").astype("<f4").view(np.uint8)),
}
