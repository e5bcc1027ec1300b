"""compressed-tensors, as llm-compressor and Neural Magic publish it.

A folder may mix schemes; a weight's scheme is recognized by the names and types of its tensors:

    weight_packed int32           integers of 2, 3, 4 or 8 bits, ``weight_shape`` (rows, columns)
    weight_packed uint8           FP4: NVFP4 with ``weight_global_scale``, else MXFP4
    weight int8, FP8              a byte per weight

Signed codes are stored plus half of their range; 3-bit codes cross words. ``weight_zero_point`` is
packed along rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from localrt.models.checkpoints.safetensors_header import E5M2, INT8, INT32, INT64, RAW_BYTES
from localrt.models.checkpoints.schemes.floats import fp8_rows, mxfp4_rows, nvfp4_rows
from localrt.models.checkpoints.schemes.rows import (
    CodedRows,
    Grid,
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
from localrt.models.checkpoints.schemes.weights import (
    Keys,
    Parts,
    require_shape,
    weights_alone,
    wrong,
)
from localrt.models.tensor_source import RowSource, StoredTensor
from localrt.quant.formats import BF16, F8_E4M3, MXFP4, NVFP4
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.formats.published import GROUPS

_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_PACKED, _WEIGHT, _SCALE = ".weight_packed", ".weight", ".weight_scale"
_FACTOR = ".weight_global_scale"
_BITS = (2, 3, 4, 8)
_SHAPE, _ZEROS, _GROUPS = ".weight_shape", ".weight_zero_point", ".weight_g_idx"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """See ``Scheme``. ``blocks`` are the FP8 block sizes (rows, columns) of all config groups;
    since targets may overlap, a module's is recognized by the shape of its scales.
    """

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (_PACKED, _SCALE, _FACTOR, _SHAPE, _ZEROS, _GROUPS, _WEIGHT), _WEIGHT
    )
    notes: tuple[str, ...]
    typical: str
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, keys: Keys) -> CompressedTensors:
        """Read a ``quantization_config``.

        Raises:
            UnsupportedModelError: an unsupported format or transform of inputs.
            CheckpointError: a key is malformed.
        """
        keys.one_of("format", _FORMATS, "dense")
        if keys.value("transform_config"):
            raise keys.unread("transform_config", "rotated inputs")
        sparsity = keys.inner("sparsity_config")
        if sparsity is not None:
            sparsity.one_of("format", ("dense",), "dense")
        notes: list[str] = []
        blocks: list[tuple[int, int]] = []
        formats: list[str] = []
        for group in keys.all_inner("config_groups"):
            group.one_of("format", (*_FORMATS, None), None)
            weights, inputs = group.inner("weights"), group.inner("input_activations")
            if weights is None:
                continue
            kind = weights.one_of("type", ("int", "float"), "int")
            bits = weights.one_of("num_bits", _BITS, 8)
            if (block := weights.pair("block_structure")) is not None:
                blocks.append(block)
            formats.append(_typical(kind, bits, weights))
            if inputs is not None:
                notes.append(weights_alone(kind, bits, inputs.number("num_bits", 8)))
        return cls(tuple(dict.fromkeys(notes)), (formats or [BF16.name])[0], tuple(blocks))

    def source(self, parts: Parts) -> RowSource | None:
        packed, weight = parts.find(_PACKED), parts.find(_WEIGHT)
        if packed is not None and packed.info.format == RAW_BYTES:
            scales = parts.need(_SCALE)
            factor = parts.find(_FACTOR)
            if factor is None and scales.info.format == F8_E4M3:
                factor = parts.need(_FACTOR)
            if factor is not None:
                return nvfp4_rows(parts.name, packed, scales, factor, inverse=True)
            return mxfp4_rows(parts.name, packed, scales)
        if packed is not None:
            return _packed(parts, packed)
        if weight is None:
            parts.need(_PACKED)
        assert weight is not None
        if weight.info.format in (F8_E4M3, E5M2):
            return fp8_rows(parts.name, weight, parts.need(_SCALE), self._block(parts))
        if weight.info.format == INT8:
            return _bytes(parts, weight)
        if len(parts.tensors) > 1:
            raise wrong(weight, "has scales, and is not quantized: download the model again")
        return None

    def _block(self, parts: Parts) -> tuple[int, int] | None:
        """The block size that fits the scales' shape, else the first."""
        shape, scales = parts.need(_WEIGHT).info.shape, parts.need(_SCALE).info.shape
        fitting = (
            block
            for block in self.blocks
            if scales == tuple(-(-size // step) for size, step in zip(shape, block, strict=False))
        )
        return next(fitting, self.blocks[0] if self.blocks else None)


def _typical(kind: str, bits: int, weights: Keys) -> str:
    """The usual format of a group's weights, assuming bfloat16 scales."""
    group = weights.value("group_size")
    if kind == "float":
        fp4 = NVFP4 if group == NVFP4.block else MXFP4
        return fp4.name if bits == 4 else "e4m3-g128"
    size = group_of(group) if type(group) is int and group > 0 else GROUPS[0]
    kind = "b" if weights.flag("symmetric", True) else "z"
    return f"int{stored_bits(bits)}-g{size}{kind}" if size else "f32"


def _packed(parts: Parts, packed: StoredTensor) -> RowSource:
    """Return the source of integers packed in words."""
    require_shape(packed, INT32, None, None)
    shape = parts.need(_SHAPE)
    require_shape(shape, INT32 if shape.info.format == INT32 else INT64, 2)
    each = shape.info.format.block_bytes
    rows, columns = shape.read().data.view(f"<i{each}").reshape(-1).tolist()
    words = packed.info.shape[1]
    bits = next((bits for bits in _BITS if columns * bits == words * 32), None)
    if rows != packed.info.shape[0] or bits is None:
        raise wrong(packed, f"does not hold {rows} rows of {columns} numbers of 2 to 8 bits")
    return _whole_numbers(parts, packed, rows, columns, bits)


def _bytes(parts: Parts, weight: StoredTensor) -> RowSource:
    """Return the source of integers in bytes."""
    require_shape(weight, INT8, None, None)
    rows, columns = weight.info.shape
    return _whole_numbers(parts, weight, rows, columns, 8)


def _whole_numbers(
    parts: Parts, codes: StoredTensor, rows: int, columns: int, bits: int
) -> RowSource:
    scales, zeros, groups = parts.need(_SCALE), parts.find(_ZEROS), parts.find(_GROUPS)
    grid = Grid.of(scales, rows, columns, None)
    order = column_groups(groups, columns, columns // grid.width, may_be_unset=True)
    group = group_of(grid.width, columns) if order is None else 0
    if zeros is None:
        codec = symmetric_codec(stored_bits(bits), group, scales.info.format)
    else:
        codec = zero_point_codec(stored_bits(bits), group)
        count = columns // grid.width
        if zeros.info.format == INT8:
            require_shape(zeros, INT8, scales.info.shape[0], count)
        else:
            require_shape(zeros, INT32, -(-rows * bits // 32), count)
    info = weight_info(parts.name, rows, columns, codec.format)
    return _WholeNumbers(info, codec, codes, grid, zeros, order, bits)


@dataclass(frozen=True, slots=True)
class _WholeNumbers(CodedRows):
    codes: StoredTensor
    grid: Grid
    zeros: StoredTensor | None
    order: tuple[int, ...] | None
    bits: int

    def _codes(self, start: int, stop: int) -> Bytes:
        data = self.codes.read(start, stop).data
        if self.codes.info.format == INT8:
            return data ^ np.uint8(128)
        codes = codes_in_rows(data, self.bits)
        return middle_codes(codes, self.bits) if self.zeros is None else codes

    def _scales(self, start: int, stop: int) -> Floats:
        columns, block = self.info.shape[1], self.codec.format.block
        if self.order is not None:
            block = self.grid.width
        found = self.grid.of_rows(start, stop, columns, block)
        if self.zeros is None:
            scales = symmetric_scales(self.codec, found, stored_bits(self.bits))
        else:
            zeros = np.repeat(self._zeros(start, stop), self.grid.width // block, axis=1)
            scales = np.stack([found, zeros], axis=-1)
        return scales if self.order is None else scales[:, list(self.order)]

    def _zeros(self, start: int, stop: int) -> Floats:
        """Return zero points (rows, published groups)."""
        assert self.zeros is not None
        if self.zeros.info.format == INT8:
            zeros: Floats = (self.zeros.read(start, stop).data ^ np.uint8(128)).astype(np.float32)
            return zeros
        each, span = word_span(self.bits)
        first, count = start // each, self.zeros.info.shape[0]
        words = self.zeros.read(first * span, min(-(-stop // each) * span, count)).data
        groups = words.reshape(len(words), -1, 4).swapaxes(0, 1)  # (groups, words, bytes)
        rows = codes_in_rows(groups.reshape(len(groups), -1), self.bits).T
        return rows[start - first * each : stop - first * each].astype(np.float32)
