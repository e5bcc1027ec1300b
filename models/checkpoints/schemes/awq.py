"""AWQ, as AutoAWQ's GEMM version writes it.

``qweight`` (columns, rows / 8) and ``qzeros`` (groups, rows / 8) pack eight neighbouring rows in an
int32, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from localrt.models.checkpoints.base import RowSource, StoredTensor
from localrt.models.checkpoints.safetensors.header import INT32
from localrt.models.checkpoints.schemes.keys import Keys
from localrt.models.checkpoints.schemes.rows import (
    FLOATS,
    ColumnRows,
    group_of,
    read_columns,
    symmetric_codec,
    weight_info,
    zero_point_codec,
)
from localrt.models.checkpoints.schemes.weights import Parts, require_shape, wrong
from localrt.quant.formats.packed import Bytes

_WORDS, _ZEROS, _SCALES = ".qweight", ".qzeros", ".scales"
_EACH = 8  # rows in a word
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of them is

_ENDINGS: Mapping[str, str] = MappingProxyType(dict.fromkeys((_WORDS, _ZEROS, _SCALES), ".weight"))


@dataclass(frozen=True, slots=True)
class Awq:
    """See ``Scheme``. ``group`` 0 is a whole row."""

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
        group = keys.number("group_size", 128)
        if group == 0 or group < -1:
            raise keys.wrong("group_size", "should be a number of columns, or -1 for whole rows")
        return cls(max(group, 0), keys.flag("zero_point", True))

    @property
    def typical(self) -> str:
        group = group_of(self.group)
        return f"int4-g{group}{'z' if self.zero_points else ''}" if group else "f32"

    @property
    def endings(self) -> Mapping[str, str]:
        return _ENDINGS

    def source(self, parts: Parts) -> RowSource | None:
        words, scales = parts.need(_WORDS), parts.need(_SCALES)
        zeros = parts.need(_ZEROS) if self.zero_points else None
        require_shape(words, INT32, None, None)
        columns, rows = words.info.shape[0], words.info.shape[1] * _EACH
        group = self.group or columns
        if columns % group:
            raise wrong(words, f"has {columns} columns, which groups of {group} do not divide")
        if scales.info.format not in FLOATS:
            raise wrong(scales, "should be F16, BF16 or F32")
        require_shape(
            scales, None, columns // group, rows, why=f"for groups of {group} (group_size)"
        )
        if zeros is not None:
            require_shape(zeros, INT32, columns // group, rows // _EACH)
            codec = zero_point_codec(4, group_of(group))
        else:
            codec = symmetric_codec(4, group_of(group), scales.info.format)
        info = weight_info(parts.name, rows, columns, codec.format)
        return _AwqRows(info, codec, words, scales, 4, group, None, zeros)


@dataclass(frozen=True, slots=True)
class _AwqRows(ColumnRows):
    zeros: StoredTensor | None

    def _codes(self, start: int, stop: int) -> Bytes:
        return _rows_of(self.words, start, stop)

    def _zeros(self, start: int, stop: int) -> Bytes | None:
        return None if self.zeros is None else _rows_of(self.zeros, start, stop).T


def _rows_of(words: StoredTensor, start: int, stop: int) -> Bytes:
    """(rows, columns or groups) of the words that hold rows ``start`` to ``stop``."""
    first = start // _EACH
    found = read_columns(words, first, -(-stop // _EACH)).view("<u4")[..., 0]  # (columns, words)
    pairs = np.ascontiguousarray(found.T).view(np.uint8).reshape(*found.T.shape, 4)
    rows = np.empty((len(pairs), _EACH, len(found)), np.uint8)
    for row, place in enumerate(_PLACES):
        rows[:, row] = pairs[..., place // 2] >> 4 * (place % 2) & 15
    return rows.reshape(-1, len(found))[start - first * _EACH : stop - first * _EACH]
