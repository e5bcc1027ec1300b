"""Published FP4 and FP8 weights: transformers' own fp8, and NVIDIA's ModelOpt.

FP4 has two adjacent columns in a byte, the first in its low nibble, and a separate tensor of
scales: E4M3 per 16 columns (NVFP4), exponents per 32 (MXFP4). localrt's formats put the scale
before its group's nibbles, and pair column j with j + 8 or j + 16; no value changes. FP8 is E4M3 or
E5M2 codes with a scale per tensor, row, or block: DeepSeek and Qwen publish blocks of 128 x 128
with ``weight_scale_inv``, which is multiplied like any other scale. E4M3 keeps its byte; E5M2,
rarely used for weights, becomes float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from localrt.models.checkpoints.safetensors_header import E5M2, EXPONENTS, INT8, RAW_BYTES
from localrt.models.checkpoints.schemes.rows import (
    FLOATS,
    CodedRows,
    Decoded,
    Grid,
    group_of,
    numbers,
    weight_info,
)
from localrt.models.checkpoints.schemes.weights import (
    Keys,
    Parts,
    require_shape,
    weights_alone,
    wrong,
)
from localrt.models.tensor_source import RowSource, StoredTensor
from localrt.quant.formats import F8_E4M3, MXFP4, NVFP4, E4m3Codec, Format, GroupCodec
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.formats.published import GROUPS


def nvfp4_rows(
    name: str,
    nibbles: StoredTensor,
    scales: StoredTensor,
    factor: StoredTensor | None,
    *,
    inverse: bool = False,
) -> RowSource:
    """The matrix ``name``; values are multiplied by ``factor``, or with ``inverse`` divided by it.

    Raises:
        CheckpointError: the tensors are not NVFP4.
    """
    shape = _shape(nibbles, scales, NVFP4, F8_E4M3)
    info = weight_info(name, *shape, NVFP4)
    if factor is None:
        return _Fp4Rows(info, nibbles, scales)
    if math.prod(factor.info.shape) != 1 or factor.info.format not in FLOATS:
        raise wrong(factor, "should be one number in F32, F16 or BF16")
    return _NvFp4Rows(info, nibbles, scales, factor, inverse)


def mxfp4_rows(name: str, nibbles: StoredTensor, scales: StoredTensor) -> RowSource:
    """The matrix ``name``.

    Raises:
        CheckpointError: the tensors are not MXFP4.
    """
    shape = _shape(nibbles, scales, MXFP4, RAW_BYTES)
    return _Fp4Rows(weight_info(name, *shape, MXFP4), nibbles, scales)


def regrouped_nibbles(pairs: Bytes) -> Bytes:
    """(..., n) bytes of adjacent columns as n bytes of columns j and j + n."""
    half = pairs.shape[-1] // 2
    low, high = pairs[..., :half], pairs[..., half:]
    out = np.empty_like(pairs)
    out[..., ::2] = (low & 15) | (high << 4)
    out[..., 1::2] = (low >> 4) | (high & 0xF0)
    return out


def _shape(
    nibbles: StoredTensor, scales: StoredTensor, format_: Format, kind: Format
) -> tuple[int, int]:
    require_shape(nibbles, RAW_BYTES, None, None)
    rows, columns = nibbles.info.shape[0], 2 * nibbles.info.shape[1]
    if columns % format_.block:
        raise wrong(nibbles, f"should hold rows of whole groups of {format_.block}, two to a byte")
    require_shape(scales, kind, rows, columns // format_.block)
    return rows, columns


@dataclass(frozen=True, slots=True)
class _Fp4Rows(RowSource):
    nibbles: StoredTensor
    scales: StoredTensor

    def _read(self, start: int, stop: int) -> Bytes:
        format_ = self.info.format
        out = np.empty(
            (stop - start, self.info.shape[1] // format_.block, format_.block_bytes), np.uint8
        )
        out[:, :, 0] = self.scales.read(start, stop).data
        pairs = self.nibbles.read(start, stop).data
        out[:, :, 1:] = regrouped_nibbles(pairs.reshape(*out.shape[:2], format_.block // 2))
        return out


@dataclass(frozen=True, slots=True)
class _NvFp4Rows(_Fp4Rows):
    factor: StoredTensor
    inverse: bool

    @property
    def scale(self) -> float:
        """The tensor's scale, four bytes that are read each time."""
        factor = numbers(self.factor.read()).reshape(-1)[:1]
        with np.errstate(all="ignore"):
            factor = np.float32(1) / factor if self.inverse else factor
        if not np.isfinite(factor[0]):
            raise wrong(self.factor, f"makes every value {factor[0]}")
        return float(factor[0])


def fp8_rows(
    name: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None
) -> RowSource:
    """The matrix ``name``; ``block`` is (rows, columns) that share a scale, if in the config.

    Raises:
        CheckpointError: not a matrix in FP8, or its scales do not fit.
    """
    if codes.info.format not in (F8_E4M3, E5M2):
        raise wrong(codes, "should be FP8, as its scales say")
    require_shape(codes, None, None, None)
    rows, columns = codes.info.shape
    grid = Grid.of(scales, rows, columns, block)
    group = group_of(grid.width, columns) if codes.info.format == F8_E4M3 else 0
    codec: GroupCodec = E4m3Codec(group)
    if not group:
        codec = Decoded(E4m3Codec(GROUPS[0]) if codes.info.format == F8_E4M3 else _E5m2())
    return _Fp8Rows(weight_info(name, rows, columns, codec.format), codec, codes, grid)


@dataclass(frozen=True, slots=True)
class _Fp8Rows(CodedRows):
    codes: StoredTensor
    grid: Grid

    def _codes(self, start: int, stop: int) -> Bytes:
        return self.codes.read(start, stop).data

    def _scales(self, start: int, stop: int) -> Floats:
        columns, block = self.info.shape[1], self.codec.format.block
        return self.grid.of_rows(start, stop, columns, block)[..., None]


@dataclass(frozen=True, slots=True)
class _E5m2:
    """E5M2, the upper half of a float16: see ``GroupCodec``."""

    format: Format = E5M2

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        values = (codes.astype("<u2") << 8).view("<f2").astype(np.float32)
        return values * scales

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        raise NotImplementedError

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        raise NotImplementedError


_WEIGHT, _STACK = ".weight", "_proj"
_SCALES = ("_scale_inv", "_scale")
_PLAIN_SCALE = ".scale"


@dataclass(frozen=True, slots=True)
class Fp8:
    """transformers' ``fp8`` (DeepSeek, Qwen, Mistral) and ``fbgemm_fp8``: see ``Scheme``.

    A weight's scale is ``weight_scale_inv``, ``weight_scale`` or ``scale`` (DeepSeek-V4, whose
    experts are MXFP4). A layer's experts may be one tensor, without ``.weight`` in its name.
    ``block`` is (rows, columns) that share a scale; None: a scale per row or tensor.
    """

    endings: ClassVar[Mapping[str, str]] = {
        **{".weight" + scale: ".weight" for scale in _SCALES},
        **{"_proj" + scale: "_proj" for scale in _SCALES},
        _PLAIN_SCALE: ".weight",
        **{".weight": ".weight", "_proj": "_proj"},
    }
    block: tuple[int, int] | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, keys: Keys) -> Fp8:
        """Read a ``quantization_config``.

        Raises:
            UnsupportedModelError: an unsupported data type.
            CheckpointError: a key is malformed.
        """
        keys.one_of("fmt", ("e4m3", "float8_e4m3fn", None), None)
        return cls(keys.pair("weight_block_size"), (weights_alone("float", 8, 8),))

    @property
    def typical(self) -> str:
        group = group_of(self.block[1]) if self.block else GROUPS[0]
        return E4m3Codec(group).format.name if group else "f32"

    def source(self, parts: Parts) -> RowSource | None:
        kind = _WEIGHT if parts.name.endswith(_WEIGHT) else _STACK
        scales = next((parts.find(kind + end) for end in _SCALES if parts.find(kind + end)), None)
        plain, codes = parts.find(_PLAIN_SCALE), parts.find(kind)
        if plain is not None:
            if codes is None or codes.info.format not in (INT8, F8_E4M3, E5M2):
                return None  # a scale of another kind, as of Gemma 4's routers
            if (codes.info.format, plain.info.format) == (INT8, EXPONENTS):
                both = (replace(n, info=replace(n.info, format=RAW_BYTES)) for n in (codes, plain))
                return mxfp4_rows(parts.name, *both)
        codes, scales = parts.need(kind), scales or plain
        if scales is None:
            if codes.info.format not in (F8_E4M3, E5M2):
                return None
            scales = parts.need(kind + _SCALES[0])
        return fp8_rows(parts.name, codes, scales, self.block)


_SCALE, _FACTOR = ".weight_scale", ".weight_scale_2"
_ACTIVATION_BITS = {"NVFP4": 4, "FP8": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "W4A8_NVFP4_FP8": 8}
_ALONE = ("NVFP4_AWQ", "W4A16_NVFP4", "FP8_PB_WO")  # weight-only
_MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """NVIDIA's ModelOpt, configured in ``hf_quant_config.json`` or the config: see ``Scheme``.

    NVFP4 is ``weight`` (rows, columns / 2) in bytes, ``weight_scale`` in E4M3 per 16 columns, and
    ``weight_scale_2``, the tensor's scale. FP8 is ``weight`` and ``weight_scale``.
    """

    endings: ClassVar[Mapping[str, str]] = dict.fromkeys((_WEIGHT, _SCALE, _FACTOR), _WEIGHT)
    notes: tuple[str, ...]
    typical: str

    @classmethod
    def of(cls, keys: Keys) -> ModelOpt:
        """Read a ``quantization_config``, or ``quantization`` in ``hf_quant_config.json``.

        Raises:
            UnsupportedModelError: an unsupported algorithm.
        """
        known = (*_ACTIVATION_BITS, *_ALONE)
        algorithms = [keys.one_of("quant_algo", (*known, _MIXED), "")]
        if algorithms[0] == _MIXED:
            layers = keys.all_inner("quantized_layers")
            algorithms = [layer.one_of("quant_algo", known, "") for layer in layers]
        notes = [
            weights_alone("float", 4 if "FP4" in name else 8, _ACTIVATION_BITS[name])
            for name in dict.fromkeys(algorithms)
            if name in _ACTIVATION_BITS
        ]
        fp8 = all("FP4" not in name for name in algorithms)
        return cls(tuple(notes), "e4m3-g128" if fp8 else NVFP4.name)

    def source(self, parts: Parts) -> RowSource | None:
        weight = parts.need(_WEIGHT)
        if weight.info.format == RAW_BYTES:
            scale, factor = parts.need(_SCALE), parts.need(_FACTOR)
            return nvfp4_rows(parts.name, weight, scale, factor, inverse=False)
        if weight.info.format == F8_E4M3:
            return fp8_rows(parts.name, weight, parts.need(_SCALE), None)
        if len(parts.tensors) > 1:
            raise wrong(
                weight, "has scales, and is neither NVFP4 nor FP8: download the model again"
            )
        return None
