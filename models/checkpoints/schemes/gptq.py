"""GPTQ, as AutoGPTQ and GPTQModel write it.

``qweight`` (columns * bits / 32, rows) packs neighbouring columns, ``qzeros`` (groups, rows * bits
/ 32) neighbouring rows, both as int32. Version 1 of the files stores zero points less 1, taken off
whole words, so that a zero borrows from its neighbour; version 2 stores them as they are.
``g_idx`` names each column's group: with activation order, groups are not columns side by side,
and no group format of ours holds them.
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
    codes_in_rows,
    group_of,
    read_columns,
    symmetric_codec,
    weight_info,
    zero_point_codec,
)
from localrt.models.checkpoints.schemes.weights import Parts, require_shape, wrong
from localrt.quant.formats.packed import Bytes

_WORDS, _ZEROS, _SCALES, _ORDER = ".qweight", ".qzeros", ".scales", ".g_idx"
_LACKING: Mapping[int, int] = MappingProxyType({4: 0x11111111, 8: 0x01010101})
_NOTHING: Mapping[int, int] = MappingProxyType({4: 0, 8: 0})

_ENDINGS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys((_WORDS, _ZEROS, _SCALES, _ORDER), ".weight")
)


@dataclass(frozen=True, slots=True)
class Gptq:
    """See ``Scheme``. ``group`` 0 is a whole row; ``lacking`` is taken off words of zeros."""

    bits: int
    group: int
    symmetric: bool
    lacking: Mapping[int, int]
    modules: bool = False  # some have groups of their own
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: Keys) -> Gptq:
        """Of a ``quantization_config``.

        Raises:
            UnsupportedModelError: other bits, or another way of packing.
            CheckpointError: a key is malformed.
        """
        bits = keys.one_of("bits", (4, 8), 4)
        version = keys.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        group = keys.number("group_size", 128)
        if group == 0 or group < -1:
            raise keys.wrong("group_size", "should be a number of columns, or -1 for whole rows")
        symmetric = keys.flag("sym", True)
        lacking = _LACKING if version == "gptq" else _NOTHING
        own = any(keys.value(key) for key in ("dynamic", "extra_config"))
        return cls(bits, max(group, 0), symmetric, lacking, own)

    @property
    def typical(self) -> str:
        group = group_of(self.group)
        return f"int{self.bits}-g{group}{'' if self.symmetric else 'z'}" if group else "f32"

    @property
    def endings(self) -> Mapping[str, str]:
        return _ENDINGS

    def source(self, parts: Parts) -> RowSource | None:
        words, scales, zeros = (parts.need(part) for part in (_WORDS, _SCALES, _ZEROS))
        require_shape(words, INT32, None, None)
        count, rows = words.info.shape
        groups, order = parts.find(_ORDER), None
        # Single modules may have other bits and groups
        bits = next((n for n in (4, 8) if zeros.info.shape[1:] == (rows * n // 32,)), self.bits)
        group = self.group or count * 32 // bits
        if (bits != self.bits or self.modules) and scales.info.shape[:1] > (0,):
            group = count * 32 // bits // scales.info.shape[0] or group
        each = 32 // bits
        columns = count * each
        if columns % group:
            raise wrong(words, f"has {columns} columns, which groups of {group} do not divide")
        if scales.info.format not in FLOATS:
            raise wrong(scales, "should be F16, BF16 or F32")
        require_shape(
            scales, None, columns // group, rows, why=f"for groups of {group} (group_size)"
        )
        if rows % each:
            raise wrong(words, f"has {rows} rows, whose zero points do not fill words of {each}")
        require_shape(zeros, INT32, columns // group, rows // each)
        order = _order(groups, columns, group)
        fitting = group_of(group) if order is None else 0
        if self.symmetric:
            codec = symmetric_codec(bits, fitting, scales.info.format)
        else:
            codec = zero_point_codec(bits, fitting)
        info = weight_info(parts.name, rows, columns, codec.format)
        return _GptqRows(
            info,
            codec,
            words,
            scales,
            bits,
            group,
            order,
            zeros,
            self.symmetric,
            self.lacking[bits],
        )


def _order(groups: StoredTensor | None, columns: int, group: int) -> tuple[int, ...] | None:
    """Each column's group; None where they follow one another."""
    if groups is None:
        return None
    require_shape(groups, INT32, columns)
    order = groups.read().data.view("<i4").reshape(-1)
    if order.min() < 0 or order.max() >= columns // group:
        raise wrong(groups, f"names groups that are not among the {columns // group} there are")
    if np.array_equal(order, np.arange(columns) // group):
        return None
    return tuple(order.tolist())


@dataclass(frozen=True, slots=True)
class _GptqRows(ColumnRows):
    zeros: StoredTensor
    symmetric: bool
    lacking: int

    def _codes(self, start: int, stop: int) -> Bytes:
        words = read_columns(self.words, start, stop)  # (words, rows, 4)
        rows = np.ascontiguousarray(words.swapaxes(0, 1)).reshape(stop - start, -1)
        return codes_in_rows(rows, self.bits)

    def _zeros(self, start: int, stop: int) -> Bytes | None:
        each = 32 // self.bits
        first = start // each
        words = read_columns(self.zeros, first, -(-stop // each)).view("<u4")
        words = words + np.uint32(self.lacking)
        zeros = codes_in_rows(words.view(np.uint8).reshape(len(words), -1), self.bits)
        zeros = zeros[:, start - first * each : stop - first * each]
        if not self.symmetric:
            return zeros
        if (zeros != 1 << (self.bits - 1)).any():
            raise wrong(self.zeros, "has zero points, though the config says sym")
        return None
