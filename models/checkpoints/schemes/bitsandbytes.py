"""bitsandbytes' NF4, FP4 and LLM.int8().

In 4 bits, a matrix is consecutive nibbles, the first in a byte's high half. Besides ``weight``
(bytes, 1) there are the largest magnitude of each block (``absmax``), the
sixteen levels (``quant_map``), and shape and block size as JSON (``quant_state``). With double
quantization a block's ``absmax`` is a byte: an index into ``nested_quant_map``, whose value is
multiplied by a ``nested_absmax``, plus an offset.

In 8 bits, ``weight`` are signed bytes (rows, columns), and ``SCB`` the largest magnitude of each
row: value = code * SCB / 127. ``weight_format`` is 0, the order of rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from localrt.models.checkpoints.safetensors_header import INT8, RAW_BYTES
from localrt.models.checkpoints.schemes.rows import (
    CodedRows,
    group_of,
    weight_info,
    zero_point_codec,
)
from localrt.models.checkpoints.schemes.weights import (
    Keys,
    Parts,
    require_shape,
    weights_alone,
    wrong,
)
from localrt.models.tensor_source import RowSource, StoredTensor
from localrt.quant.formats import F32, LevelFloatCodec, unpack
from localrt.quant.formats.packed import Bytes, Floats

_WEIGHT, _ABSMAX, _LEVELS = ".weight", ".weight.absmax", ".weight.quant_map"
_STATE = ".weight.quant_state.bitsandbytes__nf4"
_NESTED, _NESTED_LEVELS = ".weight.nested_absmax", ".weight.nested_quant_map"
_FP4_STATE = ".weight.quant_state.bitsandbytes__fp4"
_MAGNITUDES, _ORDER = ".SCB", ".weight_format"
_UNIT, _MIDDLE = np.float32(1 / 127), np.float32(128)
_LONGEST_STATE = 4096
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """See ``Scheme``."""

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *(_WEIGHT, _ABSMAX, _LEVELS, _STATE, _FP4_STATE, _NESTED, _NESTED_LEVELS),
            *(_MAGNITUDES, _ORDER),
        ),
        _WEIGHT,
    )
    typical: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: Keys) -> BitsAndBytes:
        """Read a ``quantization_config``.

        Raises:
            UnsupportedModelError: other levels than NF4's and FP4's.
        """
        if keys.value("load_in_8bit"):
            return cls("int8-g128z", (weights_alone("int", 8, 8),))
        return cls(f"{keys.one_of('bnb_4bit_quant_type', ('nf4', 'fp4'), 'fp4')}-f32")

    def source(self, parts: Parts) -> RowSource | None:
        weight = parts.need(_WEIGHT)
        if weight.info.format == INT8:
            return _eight_bits(parts, weight)
        if len(parts.tensors) == 1 and weight.info.format != RAW_BYTES:
            return None
        state = parts.find(_FP4_STATE) or parts.need(_STATE)
        levels, absmax = parts.need(_LEVELS), parts.need(_ABSMAX)
        rows, columns, block, offset = _state(state)
        require_shape(levels, F32, 16)
        found = unpack(levels.read())
        codec = next((codec for codec in _CODECS if np.array_equal(codec.levels, found)), None)
        if codec is None:
            raise wrong(levels, "has other levels than NF4 and FP4")
        if rows * columns != 2 * weight.info.nbytes or weight.info.format != RAW_BYTES:
            raise wrong(weight, f"does not hold {rows} x {columns} numbers of 4 bits")
        if block % _BLOCK or columns % _BLOCK or (columns % block and block % columns):
            raise wrong(
                weight, f"has rows of {columns} in blocks of {block}: whole groups of 64 are read"
            )
        count = -(-rows * columns // block)
        nested = parts.find(_NESTED)
        require_shape(absmax, F32 if nested is None else RAW_BYTES, count)
        steps = None
        if nested is not None:
            map_ = parts.need(_NESTED_LEVELS)
            require_shape(map_, F32, 256)
            require_shape(nested, F32, None)
            size = -(-count // nested.info.shape[0])
            size = 1 << (size - 1).bit_length()  # the last block may be shorter
            if offset is None or -(-count // size) != nested.info.shape[0]:
                raise wrong(nested, f"does not divide {count} blocks")
            steps = _Nested(nested, map_, offset, size)
        info = weight_info(parts.name, rows, columns, codec.format)
        return _FourBitRows(info, codec, weight, absmax, block, steps)


_CODECS = (LevelFloatCodec("nf4"), LevelFloatCodec("fp4"))


def _eight_bits(parts: Parts, weight: StoredTensor) -> RowSource:
    """LLM.int8()'s bytes, with a scale for each row."""
    magnitudes, order = parts.need(_MAGNITUDES), parts.find(_ORDER)
    require_shape(weight, INT8, None, None)
    rows, columns = weight.info.shape
    require_shape(magnitudes, F32, rows)
    if order is not None and order.read().data.any():
        raise wrong(order, "is not 0: only bytes in the order of rows are read")
    codec = zero_point_codec(8, group_of(columns))
    info = weight_info(parts.name, rows, columns, codec.format)
    return _EightBitRows(info, codec, weight, magnitudes)


@dataclass(frozen=True, slots=True)
class _EightBitRows(CodedRows):
    weight: StoredTensor
    magnitudes: StoredTensor

    def _codes(self, start: int, stop: int) -> Bytes:
        return self.weight.read(start, stop).data ^ np.uint8(128)

    def _scales(self, start: int, stop: int) -> Floats:
        found = unpack(self.magnitudes.read())[start:stop] * _UNIT
        each = np.repeat(found[:, None], self.info.shape[1] // self.codec.format.block, axis=1)
        return np.stack([each, np.full_like(each, _MIDDLE)], axis=-1)


def _state(tensor: StoredTensor) -> tuple[int, int, int, float | None]:
    """Rows, columns, block size, and the offset of double-quantized magnitudes."""
    malformed = wrong(tensor, "is malformed: it should be JSON with a shape of two and a blocksize")
    if tensor.info.format != RAW_BYTES or not 0 < tensor.info.nbytes <= _LONGEST_STATE:
        raise malformed
    try:
        state = json.loads(tensor.read().data.tobytes())
    except (ValueError, RecursionError):
        raise malformed from None
    if not isinstance(state, dict):
        raise malformed
    shape, block, offset = state.get("shape"), state.get("blocksize"), state.get("nested_offset")
    if not isinstance(shape, list) or len(shape) != 2:
        raise malformed
    if any(type(n) is not int or not 0 < n < 1 << 31 for n in (*shape, block)):
        raise malformed
    if offset is not None and type(offset) is not float:
        raise malformed
    rows, columns = shape
    return int(rows), int(columns), int(block or 0), offset


@dataclass(frozen=True, slots=True)
class _Nested:
    """Double quantization: ``size`` magnitudes share a ``nested_absmax``."""

    absmax: StoredTensor
    levels: StoredTensor
    offset: float
    size: int

    def values(self, codes: Bytes, first: int) -> Floats:
        """Return consecutive magnitudes from index ``first`` on."""
        levels = unpack(self.levels.read())
        at = np.arange(first, first + len(codes)) // self.size
        found: Floats = levels[codes] * unpack(self.absmax.read())[at] + np.float32(self.offset)
        return found


@dataclass(frozen=True, slots=True)
class _FourBitRows(CodedRows):
    weight: StoredTensor
    absmax: StoredTensor
    block: int
    nested: _Nested | None

    def _codes(self, start: int, stop: int) -> Bytes:
        columns = self.info.shape[1]
        begin, size = start * columns // 2, (stop - start) * columns // 2
        pairs = self.weight.file.read(self.weight.offset + begin, size)
        return np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(stop - start, columns)

    def _scales(self, start: int, stop: int) -> Floats:
        columns = self.info.shape[1]
        first, last = start * columns // self.block, -(-stop * columns // self.block)
        each = self.absmax.info.format.block_bytes
        data = self.absmax.file.read(self.absmax.offset + first * each, (last - first) * each)
        values = data.view("<f4") if self.nested is None else self.nested.values(data, first)
        at = np.arange(start * columns, stop * columns, _BLOCK) // self.block - first
        found: Floats = values[at].reshape(stop - start, -1, 1)
        return found
