"""FP4 weights as published: two neighbouring columns in a byte, the first in its low nibble.

Scales lie in a tensor of their own: E4M3 for 16 columns (NVFP4), exponents for 32 (MXFP4). Ours
stand before their group's nibbles, column j beside j + 8 or j + 16: bits move, no value changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from localrt.models.checkpoints.base import RowSource, StoredTensor
from localrt.models.checkpoints.safetensors.header import RAW_BYTES
from localrt.models.checkpoints.schemes.rows import FLOATS, numbers, weight_info
from localrt.models.checkpoints.schemes.weights import require_shape, wrong
from localrt.quant.formats import F8_E4M3, MXFP4, NVFP4, Format
from localrt.quant.formats.packed import Bytes


def nvfp4_rows(
    name: str,
    nibbles: StoredTensor,
    scales: StoredTensor,
    factor: StoredTensor | None,
    *,
    inverse: bool = False,
) -> RowSource:
    """The matrix ``name``: values are times ``factor``, or with ``inverse`` divided by it.

    Raises:
        CheckpointError: tensors that are not NVFP4.
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
        CheckpointError: tensors that are not MXFP4.
    """
    shape = _shape(nibbles, scales, MXFP4, RAW_BYTES)
    return _Fp4Rows(weight_info(name, *shape, MXFP4), nibbles, scales)


def regrouped_nibbles(pairs: Bytes) -> Bytes:
    """(..., n) bytes of neighbouring columns as n bytes of columns j and j + n."""
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
        """The tensor's own factor, read each time: it is four bytes."""
        factor = numbers(self.factor.read()).reshape(-1)[:1]
        with np.errstate(divide="ignore"):
            factor = np.float32(1) / factor if self.inverse else factor
        if not np.isfinite(factor[0]):
            raise wrong(self.factor, f"makes every value {factor[0]}")
        return float(factor[0])
