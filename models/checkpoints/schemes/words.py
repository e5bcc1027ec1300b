"""AWQ and GPTQ: integers packed along columns or rows of a transposed matrix.

Files store a matrix as (columns, rows), transposed. A few thousand of our rows are read at a time,
from a part of each row of the file: fast enough, with little memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from localrt.models.checkpoints.safetensors_header import INT32
from localrt.models.checkpoints.schemes.rows import (
    FLOATS,
    CodedRows,
    Codes,
    codes_in_rows,
    column_groups,
    group_of,
    middle_codes,
    stored_bits,
    symmetric_codec,
    symmetric_scales,
    weight_info,
    word_span,
    zero_point_codec,
)
from localrt.models.checkpoints.schemes.weights import Keys, Parts, require_shape, wrong
from localrt.models.tensor_source import RowSource, StoredTensor
from localrt.quant.formats import F32, PackedTensor, unpack
from localrt.quant.formats.packed import Bytes, Floats


def read_columns(tensor: StoredTensor, first: int, last: int) -> Codes:
    """Read columns ``first`` to ``last`` of a matrix, as bytes (rows, columns, item size)."""
    rows, columns = tensor.info.shape
    each = tensor.info.format.block_bytes
    if last - first == columns:
        return tensor.read().data.reshape(rows, columns, each)
    size = (last - first) * each
    out = np.empty((rows, size), np.uint8)
    for row in range(rows):
        out[row] = tensor.file.read(tensor.offset + (row * columns + first) * each, size)
    return out.reshape(rows, -1, each)


_STRETCH = 4 << 20  # bytes at a time, whether words or unpacked codes


@dataclass(frozen=True, slots=True)
class ColumnRows(CodedRows):
    """Rows of ``words``, ``scales`` (groups, rows) and ``zeros``, of ``bits``.

    ``order`` is each column's group if groups are not ``group`` consecutive columns.
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
        """Zero points (groups, rows); None if all are the middle of the range."""

    def _scales(self, start: int, stop: int) -> Floats:
        columns = self.info.shape[1]
        found = read_columns(self.scales, start, stop)  # (groups, rows, bytes)
        flat = PackedTensor(
            "", self.scales.info.format, found.shape[:2], found.reshape(len(found), -1)
        )
        scales = np.ascontiguousarray(unpack(flat).T)  # (rows, groups)
        zeros = self._zeros(start, stop)
        if zeros is None:
            pairs = symmetric_scales(self.codec, scales, stored_bits(self.bits))
        else:
            pairs = np.stack([scales, zeros.T.astype(np.float32)], axis=-1)
        if self.order is not None:
            return pairs[:, list(self.order)]
        block = self.codec.format.block
        return pairs[:, np.arange(0, columns, block) // self.group]


_WORDS, _ZEROS, _SCALES = ".qweight", ".qzeros", ".scales"
_EACH = 8  # rows per word
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of each row in a word


@dataclass(frozen=True, slots=True)
class Awq:
    """AutoAWQ's GEMM version: see ``Scheme``. ``group`` 0 is a whole row.

    ``qweight`` (columns, rows / 8) and ``qzeros`` (groups, rows / 8) pack eight adjacent rows in an
    int32, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
    """

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys((_WORDS, _ZEROS, _SCALES), ".weight")
    group: int
    zero_points: bool
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: Keys) -> Awq:
        """Of a ``quantization_config``.

        Raises:
            UnsupportedModelError: other bits, or another way of packing.
            CheckpointError: a key is malformed.
        """
        keys.one_of("bits", (4,), 4)
        version = keys.value("version")
        Keys(
            {"version": version.lower() if isinstance(version, str) else version}, keys.where
        ).one_of("version", ("gemm", None), None)
        return cls(_group_size(keys), keys.flag("zero_point", True))

    @property
    def typical(self) -> str:
        group = group_of(self.group)
        return f"int4-g{group}{'z' if self.zero_points else ''}" if group else "f32"

    def source(self, parts: Parts) -> RowSource | None:
        words, scales = parts.need(_WORDS), parts.need(_SCALES)
        zeros = parts.need(_ZEROS) if self.zero_points else None
        require_shape(words, INT32, None, None)
        columns, rows = words.info.shape[0], words.info.shape[1] * _EACH
        group = self.group or columns
        _require_groups(words, scales, rows, columns, group)
        if zeros is not None:
            require_shape(zeros, INT32, columns // group, rows // _EACH)
            codec = zero_point_codec(4, group_of(group))
        else:
            codec = symmetric_codec(4, group_of(group), scales.info.format)
        info = weight_info(parts.name, rows, columns, codec.format)
        return _AwqRows(info, codec, words, scales, 4, group, None, zeros)


def _group_size(keys: Keys) -> int:
    """The number of columns that share a scale; 0 is a whole row."""
    group = keys.number("group_size", 128)
    if group == 0 or group < -1:
        raise keys.wrong("group_size", "should be a number of columns, or -1 for whole rows")
    return max(group, 0)


def _require_groups(
    words: StoredTensor, scales: StoredTensor, rows: int, columns: int, group: int
) -> None:
    """Raise ``CheckpointError`` unless there is one scale per row and group of columns."""
    if columns % group:
        raise wrong(words, f"has {columns} columns, which groups of {group} do not divide")
    if scales.info.format not in FLOATS:
        raise wrong(scales, "should be F16, BF16 or F32")
    require_shape(scales, None, columns // group, rows, why=f"for groups of {group} (group_size)")


@dataclass(frozen=True, slots=True)
class _AwqRows(ColumnRows):
    zeros: StoredTensor | None

    def _codes(self, start: int, stop: int) -> Bytes:
        return _rows_of(self.words, start, stop)

    def _zeros(self, start: int, stop: int) -> Bytes | None:
        return None if self.zeros is None else _rows_of(self.zeros, start, stop).T


def _rows_of(words: StoredTensor, start: int, stop: int) -> Bytes:
    """Unpack rows ``start`` to ``stop`` from words: (rows, columns or groups)."""
    first = start // _EACH
    found = read_columns(words, first, -(-stop // _EACH)).view("<u4")[..., 0]  # (columns, words)
    pairs = np.ascontiguousarray(found.T).view(np.uint8).reshape(*found.T.shape, 4)
    rows = np.empty((len(pairs), _EACH, len(found)), np.uint8)
    for row, place in enumerate(_PLACES):
        rows[:, row] = pairs[..., place // 2] >> 4 * (place % 2) & 15
    return rows.reshape(-1, len(found))[start - first * _EACH : stop - first * _EACH]


_ORDER = ".g_idx"
_BITS = (2, 3, 4, 8)
_LACKING = MappingProxyType({2: 0x55555555, 4: 0x11111111, 8: 0x01010101})


@dataclass(frozen=True, slots=True)
class Gptq:
    """AutoGPTQ's and GPTQModel's format: see ``Scheme``. ``group`` 0 is a whole row.

    ``qweight`` (columns * bits / 32, rows) packs adjacent columns, ``qzeros`` (groups, rows * bits
    / 32) adjacent rows, both as int32; 3-bit codes cross words. Version 1 of the format
    (``lacking``) stores zero points minus 1, subtracted from whole words, so that a 0 borrows from
    the next zero point, but from each of 3 bits; version 2 stores them unchanged. ``g_idx`` has
    each column's group: with activation order, a group's columns are not consecutive, and none of
    localrt's group formats fits.
    """

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (_WORDS, _ZEROS, _SCALES, _ORDER), ".weight"
    )
    bits: int
    group: int
    symmetric: bool
    lacking: bool
    modules: bool = False  # some modules have their own group sizes
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: Keys) -> Gptq:
        """Of a ``quantization_config``.

        Raises:
            UnsupportedModelError: other bits, or another way of packing.
            CheckpointError: a key is malformed.
        """
        bits = keys.one_of("bits", _BITS, 4)
        version = keys.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        symmetric = keys.flag("sym", True)
        own = any(keys.value(key) for key in ("dynamic", "extra_config"))
        return cls(bits, _group_size(keys), symmetric, version == "gptq", own)

    @property
    def typical(self) -> str:
        group = group_of(self.group)
        bits = stored_bits(self.bits)
        return f"int{bits}-g{group}{'' if self.symmetric else 'z'}" if group else "f32"

    def source(self, parts: Parts) -> RowSource | None:
        words, scales, zeros = (parts.need(part) for part in (_WORDS, _SCALES, _ZEROS))
        require_shape(words, INT32, None, None)
        count, rows = words.info.shape
        groups, order = parts.find(_ORDER), None
        # Some modules may have other bits and groups.
        bits = next((n for n in _BITS if zeros.info.shape[1:] == (rows * n // 32,)), self.bits)
        group = self.group or count * 32 // bits
        if (bits != self.bits or self.modules) and scales.info.shape[:1] > (0,):
            group = count * 32 // bits // scales.info.shape[0] or group
        each, span = word_span(bits)
        columns = count // span * each
        _require_groups(words, scales, rows, columns, group)
        if rows % each or count % span:
            raise wrong(words, f"has {rows} rows of {columns} columns, not whole words of {each}")
        require_shape(zeros, INT32, columns // group, rows // each * span)
        order = column_groups(groups, columns, columns // group)
        fitting = group_of(group) if order is None else 0
        if self.symmetric:
            codec = symmetric_codec(stored_bits(bits), fitting, scales.info.format)
        else:
            codec = zero_point_codec(stored_bits(bits), fitting)
        info = weight_info(parts.name, rows, columns, codec.format)
        return _GptqRows(
            info, codec, words, scales, bits, group, order, zeros, self.symmetric, self.lacking
        )


@dataclass(frozen=True, slots=True)
class _GptqRows(ColumnRows):
    zeros: StoredTensor
    symmetric: bool
    lacking: bool

    def _codes(self, start: int, stop: int) -> Bytes:
        words = read_columns(self.words, start, stop)  # (words, rows, 4)
        rows = np.ascontiguousarray(words.swapaxes(0, 1)).reshape(stop - start, -1)
        codes = codes_in_rows(rows, self.bits)
        return middle_codes(codes, self.bits) if self.symmetric else codes

    def _zeros(self, start: int, stop: int) -> Bytes | None:
        each, span = word_span(self.bits)
        first = start // each
        words = read_columns(self.zeros, first * span, -(-stop // each) * span).view("<u4")
        if self.lacking:
            words = words + np.uint32(_LACKING.get(self.bits, 0))
        zeros = codes_in_rows(words.view(np.uint8).reshape(len(words), -1), self.bits)
        zeros = zeros[:, start - first * each : stop - first * each]
        if self.lacking and self.bits == 3:
            zeros = zeros + np.uint8(1) & np.uint8(7)
        if not self.symmetric:
            return zeros
        if (zeros != 1 << (self.bits - 1)).any():
            raise wrong(self.zeros, "has zero points, though the config says sym")
        return None
