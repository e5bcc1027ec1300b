"""Combines rows of codes and scales from several tensors into blocks of one of localrt's formats.

The type of a scheme's scales and its group size determine the format that represents its values
exactly; no data is read for that. If no group format fits, values are unpacked to float32, also
exactly.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.safetensors_header import EXPONENTS, INT32, RAW_BYTES
from localrt.models.checkpoints.schemes.weights import require_shape, wrong
from localrt.models.tensor_source import RowSource, StoredTensor, TensorInfo
from localrt.quant.formats import (
    AFFINE,
    BF16,
    F16,
    F32,
    AffineCodec,
    BrainCodec,
    Format,
    GroupCodec,
    PackedTensor,
    ZeroPointCodec,
    unpack,
)
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.formats.published import GROUPS

FLOATS = (F32, F16, BF16)
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Codes dequantized to float32, each with its own scale: see ``GroupCodec``."""

    codec: GroupCodec
    format: Format = F32

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        return self.codec.decode(codes, scales)

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        """The bytes of the values."""
        values = self.codec.decode(codes, scales)
        return np.ascontiguousarray(values, "<f4").view(np.uint8)

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        """Not supported."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class CodedRows(RowSource):
    """Rows in the blocks of ``codec``."""

    codec: GroupCodec

    @abstractmethod
    def _codes(self, start: int, stop: int) -> Bytes:
        """Codes (rows, columns) of at least one row."""

    @abstractmethod
    def _scales(self, start: int, stop: int) -> Floats:
        """The codec's scales for the same rows' groups: (rows, groups, k)."""

    def _read(self, start: int, stop: int) -> Bytes:
        codes, scales = self._codes(start, stop), self._scales(start, stop)
        block = self.codec.format.block
        return self.codec.join(codes.reshape(-1, block), scales.reshape(-1, scales.shape[-1]))


@dataclass(frozen=True, slots=True)
class Grid:
    """One number per block of ``height`` rows and ``width`` columns of a matrix.

    A tensor of bytes holds powers of two (E8M0).
    """

    tensor: StoredTensor
    height: int
    width: int

    @classmethod
    def of(
        cls, tensor: StoredTensor, rows: int, columns: int, block: tuple[int, int] | None
    ) -> Grid:
        """The numbers of a matrix: a single one, one per row, or one per block.

        ``block`` is (rows, columns) from the config; None: derived from the shapes.

        Raises:
            CheckpointError: the tensor's shape does not fit.
        """
        shape = tensor.info.shape
        if tensor.info.format not in (*FLOATS, RAW_BYTES, EXPONENTS):
            raise wrong(tensor, "should be F32, F16, BF16 or exponents")
        if len(shape) < 2:
            count = shape[0] if shape else 1
            tensor = replace(tensor, info=replace(tensor.info, shape=(count, 1)))
            shape = (count, 1)
        if len(shape) == 2 and min(shape) > 0:
            if shape[1] == 1 and shape[0] in (1, rows):
                return cls(tensor, rows // shape[0], columns)
            height, width = block or (rows // shape[0], columns // shape[1])
            if min(height, width) > 0 and shape == (-(-rows // height), -(-columns // width)):
                return cls(tensor, height, width)
        sizes = f" of {block[0]} x {block[1]}" if block else ""
        raise wrong(tensor, f"does not divide {rows} rows of {columns} into equal blocks{sizes}")

    def of_rows(self, start: int, stop: int, columns: int, group: int) -> Floats:
        """Return one number per ``group`` of a row's ``columns``: (rows, groups)."""
        first = start // self.height
        values = numbers(self.tensor.read(first, -(-stop // self.height)))
        rows = np.arange(start, stop) // self.height - first
        if self.width == columns:
            return np.repeat(values[rows], columns // group, axis=1)
        return values[rows][:, np.arange(0, columns, group) // self.width]


def numbers(tensor: PackedTensor) -> Floats:
    """A tensor's values; bytes are exponents."""
    if tensor.format in (RAW_BYTES, EXPONENTS):
        return _POWERS[tensor.data].reshape(tensor.shape)
    return unpack(tensor)


def column_groups(
    groups: StoredTensor | None, columns: int, count: int, *, may_be_unset: bool = False
) -> tuple[int, ...] | None:
    """Each column's group of ``count``; None if groups are consecutive columns, or not set."""
    if groups is None:
        return None
    require_shape(groups, INT32, columns)
    order = groups.read().data.view("<i4").reshape(-1)
    if may_be_unset and order.min(initial=0) < 0:
        return None
    if not 0 <= order.min(initial=0) <= order.max(initial=0) < count:
        raise wrong(groups, f"names groups that are not among the {count} there are")
    if np.array_equal(order, np.arange(columns) // (columns // count)):
        return None
    return tuple(order.tolist())


def weight_info(name: str, rows: int, columns: int, format_: Format) -> TensorInfo:
    """The ``TensorInfo`` of a matrix in ``format_``."""
    return TensorInfo(name, (rows, columns), format_, rows * format_.row_bytes(columns))


def group_of(*spans: int) -> int:
    """The largest of localrt's group sizes that divides all ``spans``; 0 if none does."""
    return next((group for group in GROUPS if not any(span % group for span in spans)), 0)


def symmetric_codec(bits: int, group: int, scales: Format) -> GroupCodec:
    """The codec of scale * (code - half the range); ``group`` 0: no group format fits."""
    if not group:
        return Decoded(ZeroPointCodec(bits, GROUPS[0]))
    if scales == F16:
        return AFFINE[f"int{bits}-g{group}"]
    return BrainCodec(bits, group) if scales == BF16 else ZeroPointCodec(bits, group)


def symmetric_scales(codec: GroupCodec, scales: Floats, bits: int) -> Floats:
    """Scales for ``symmetric_codec``: (..., k) from scales (...)."""
    middle = np.float32(1 << (bits - 1))
    if isinstance(codec, AffineCodec):
        return scales[..., None]
    with np.errstate(all="ignore"):
        second = -middle * scales if isinstance(codec, BrainCodec) else np.full_like(scales, middle)
    return np.stack([scales, second], axis=-1)


def zero_point_codec(bits: int, group: int) -> GroupCodec:
    """The codec of scale * (code - zero)."""
    return ZeroPointCodec(bits, group) if group else Decoded(ZeroPointCodec(bits, GROUPS[0]))


# Always uint8; numpy's stubs lose the type in shifts.
Codes = npt.NDArray[Any]


def stored_bits(bits: int) -> int:
    """The bits of the smallest codec that holds codes of ``bits``."""
    return 4 if bits <= 4 else 8


def middle_codes(codes: Codes, bits: int) -> Codes:
    """Codes of ``bits``, moved so that the middle of their range is that of ``stored_bits``."""
    moved: Codes = codes + np.uint8((1 << stored_bits(bits) - 1) - (1 << bits - 1))
    return moved


def word_span(bits: int) -> tuple[int, int]:
    """How many codes fill how many whole words of 32 bits: 3-bit codes cross words."""
    common = math.gcd(bits, 32)
    return 32 // common, bits // common


def codes_in_rows(packed: Codes, bits: int) -> Codes:
    """Codes (rows, 8 n // bits) of 2 to 8 bits, one after another in bytes (rows, n)."""
    if bits == 8:
        return packed
    if bits == 4:
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    stream = np.unpackbits(packed, axis=1, bitorder="little")
    stream = stream[:, : stream.shape[1] // bits * bits].reshape(len(packed), -1, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes: Codes = (stream * weights).sum(axis=-1, dtype=np.uint8)
    return codes
