"""MLX's groups: columns packed in ``weight``, with ``scales`` and usually ``biases``.

An affine value is scale * code + bias. In modes named after float formats, codes are floats and
scales are bytes. A config's ``quantization`` has mode, bits and group size for all weights, and
exceptions by module name. 2- to 6-bit codes without a group format of localrt's are stored in 8
bits.

mlx-lm's conversion changes some models' values, which is undone if possible. A model was converted
if its convolutions' taps are on the second axis instead of the last. Conversion adds 1 to Qwen3.5's
and Qwen3-Next's norms; subtracting it is exact in float32. It multiplies Falcon-H1's factors into
the weights, which cannot be undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from localrt.common.errors import UnsupportedModelError
from localrt.models.checkpoints.safetensors_header import RAW_BYTES, UINT32
from localrt.models.checkpoints.schemes.floats import fp8_rows, mxfp4_rows, nvfp4_rows
from localrt.models.checkpoints.schemes.rows import (
    FLOATS,
    CodedRows,
    Grid,
    codes_in_rows,
    group_of,
    minimum_codec,
    stored_bits,
    weight_info,
)
from localrt.models.checkpoints.schemes.weights import Keys, Parts, require_shape, wrong
from localrt.models.checkpoints.text_model import decoder_tensor
from localrt.models.row_order import without_one
from localrt.models.tensor_source import RowSource, StoredTensor
from localrt.quant.formats import F8_E4M3
from localrt.quant.formats.packed import Bytes, Floats

_WEIGHT, _SCALES, _MINIMA = ".weight", ".scales", ".biases"
_BITS = (2, 3, 4, 5, 6, 8)
_MODES = {  # default bits and group size; only affine may have others
    "affine": (4, 64),
    "mxfp4": (4, 32),
    "nvfp4": (4, 16),
    "mxfp8": (8, 32),
}


@dataclass(frozen=True, slots=True)
class _Width:
    """How a module is packed."""

    mode: str
    bits: int
    group: int


@dataclass(frozen=True, slots=True)
class Mlx:
    """See ``Scheme``. The modules' default packing, and exceptions."""

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys((_WEIGHT, _SCALES, _MINIMA), _WEIGHT)
    usual: _Width
    modules: Mapping[str, _Width]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: Keys) -> Mlx:
        """Read a config's ``quantization``.

        Raises:
            UnsupportedModelError: unsupported bits or mode.
            CheckpointError: a key is malformed.
        """
        modules: dict[str, _Width] = {}
        for name, value in keys.values.items():
            if isinstance(value, Mapping) and (own := keys.inner(name)) is not None:
                modules[_plain(name)] = _width(own)
        return cls(_width(keys), modules)

    @property
    def typical(self) -> str:
        if self.usual.mode != "affine":
            return "e4m3-g32" if self.usual.mode == "mxfp8" else self.usual.mode
        group = group_of(self.usual.group)
        return f"int{stored_bits(self.usual.bits)}-g{group}b" if group else "f32"

    def source(self, parts: Parts) -> RowSource | None:
        weight = parts.find(_WEIGHT)
        if len(parts.tensors) == 1 and weight is not None and weight.info.format != UINT32:
            return None
        weight, scales = parts.need(_WEIGHT), parts.need(_SCALES)
        width = self.modules.get(parts.stem, self.usual)
        bits, group = width.bits, width.group
        require_shape(weight, UINT32, None, None)
        if width.mode != "affine":
            return _floats(parts.name, weight, scales, width.mode)
        minima = parts.need(_MINIMA)
        rows, words = weight.info.shape
        columns = words * 32 // bits
        if words * 32 % bits or columns % group:
            raise wrong(weight, f"has rows that are not whole groups of {group} in {bits} bits")
        if scales.info.format not in FLOATS:
            raise wrong(scales, "should be F16, BF16 or F32")
        require_shape(
            scales, None, rows, columns // group, why=f"for groups of {group} (group_size)"
        )
        require_shape(minima, scales.info.format, rows, columns // group)
        codec = minimum_codec(stored_bits(bits), group_of(group), scales.info.format)
        info = weight_info(parts.name, rows, columns, codec.format)
        grids = Grid(scales, 1, group), Grid(minima, 1, group)
        return _MlxRows(info, codec, weight, *grids, bits)


def _width(keys: Keys) -> _Width:
    mode = keys.one_of("mode", tuple(_MODES), "affine")
    bits, group = _MODES[mode]
    if mode != "affine":
        return _Width(mode, keys.one_of("bits", (bits,), bits), group)
    group = keys.number("group_size", group)
    if group < 1:
        raise keys.wrong("group_size", "should be a number of columns")
    return _Width(mode, keys.one_of("bits", _BITS, bits), group)


def _plain(module: str) -> str:
    """A module's name without the prefix we strip from tensor names."""
    name = f"{module}{_WEIGHT}"
    plain = decoder_tensor(name, {}, multimodal=True) or decoder_tensor(name, {}, multimodal=False)
    return (plain or name).removesuffix(_WEIGHT)


def _floats(name: str, words: StoredTensor, scales: StoredTensor, mode: str) -> RowSource:
    """Return a matrix in one of the floating-point modes."""
    rows, columns = words.info.shape
    require_shape(scales, RAW_BYTES, None, None)
    codes = replace(words, info=replace(words.info, shape=(rows, 4 * columns), format=RAW_BYTES))
    if mode == "mxfp4":
        return mxfp4_rows(name, codes, scales)
    if mode == "nvfp4":
        scales = replace(scales, info=replace(scales.info, format=F8_E4M3))
        return nvfp4_rows(name, codes, scales, None)
    codes = replace(codes, info=replace(codes.info, format=F8_E4M3))
    return fp8_rows(name, codes, scales, (1, _MODES[mode][1]))


@dataclass(frozen=True, slots=True)
class _MlxRows(CodedRows):
    codes: StoredTensor
    grid: Grid
    minima: Grid
    bits: int

    def _codes(self, start: int, stop: int) -> Bytes:
        return codes_in_rows(self.codes.read(start, stop).data, self.bits)

    def _scales(self, start: int, stop: int) -> Floats:
        columns, block = self.info.shape[1], self.codec.format.block
        both = [grid.of_rows(start, stop, columns, block) for grid in (self.grid, self.minima)]
        return np.stack(both, axis=-1)


_NORMS_FROM_ZERO = ("Qwen3_5", "Qwen3Next")
_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_FACTORS = "FalconH1"


def unconverted(
    architecture: str, tensors: Mapping[str, RowSource], path: Path
) -> dict[str, RowSource]:
    """``tensors`` of a model at ``path`` with mlx-lm's conversion undone.

    Raises:
        UnsupportedModelError: the conversion cannot be undone.
    """
    found = dict(tensors)
    if not any(name.endswith("conv1d.weight") and _is_moved(t) for name, t in found.items()):
        return found
    if architecture.startswith(_FACTORS):
        raise UnsupportedModelError(
            f"{path}: MLX's conversion of {architecture} changed its weights, which localrt "
            "cannot undo; use the original model, or a GGUF file of it"
        )
    if architecture.startswith(_NORMS_FROM_ZERO):
        for name, tensor in tensors.items():
            if name.endswith(_NORMS) and len(tensor.info.shape) == 1:
                found[name] = without_one(tensor)
    return found


def _is_moved(tensor: RowSource) -> bool:
    """Whether a convolution's taps are on the second axis of three."""
    shape = tensor.info.shape
    return len(shape) == 3 and shape[2] == 1 and shape[1] > 1
