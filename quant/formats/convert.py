"""Float32 weights to packed bytes and back: the plain reference that kernels are checked against.

``pack`` rounds to nearest and derives each scale from its group's range; a quantizer with better
scales or codes calls ``assemble``. ``unpack`` follows ggml's block layouts and order of operations,
so results equal ggml's bit for bit; our own formats are decoded by their codecs. Both work in
pieces that stay in the CPU's cache. Of shapes they only require that rows are whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, OptionError
from localrt.quant.formats.catalog import CODECS, GROUP_CODECS, read_codes
from localrt.quant.formats.codebook import CODEBOOKS, split_fields
from localrt.quant.formats.fp4 import E4M3
from localrt.quant.formats.ggml import BF16, F16, F32, GGML_FORMATS, IQ4_LEVELS
from localrt.quant.formats.packed import (
    Bytes,
    Codec,
    Floats,
    Format,
    PackedTensor,
    unpack_blocks_of,
)
from localrt.quant.formats.six_bits import six_bit_scales

_PIECE = 1 << 16  # weights packed or unpacked at a time: 256 KiB of values


def codec_of(format_: Format) -> Codec:
    """The codec of one of our own formats.

    Raises:
        OptionError: localrt does not quantize to the format.
    """
    codec = CODECS.get(format_.name)
    if codec is None or codec.format != format_:
        raise OptionError(
            f"localrt does not quantize to {format_.name}: choose from {', '.join(CODECS)}"
        )
    return codec


def pack(
    values: Floats, format_: Format, *, name: str = "", scale: float | None = None
) -> PackedTensor:
    """``values``, (rows, columns) or (n,), in ``format_``, rounded to nearest.

    ``scale`` sets the tensor's factor of a format that has one (NVFP4), so that matrices that are
    stacked later share theirs. ``name`` is for messages and the result.

    Raises:
        CheckpointError: NaN or infinity among the values.
        OptionError: columns that are not whole groups, values too large for the format's scales, or
            a format that localrt does not pack.
    """
    require_finite(values, name)
    if format_ in (F32, F16, BF16):
        return _cast(values, format_, name)
    codec = codec_of(format_)
    require_whole_groups(values.shape[-1], codec, name)
    if scale is None:
        scale = codec.tensor_scale(float(np.abs(values).max(initial=0)))
    groups = values.reshape(-1, format_.block)
    blocks = np.empty((len(groups), format_.block_bytes), np.uint8)
    step = _PIECE // format_.block
    for start in range(0, len(groups), step):
        piece = groups[start : start + step]
        if scale != 1.0:
            piece = piece / np.float32(scale)
        scales = codec.fit(piece)
        require_finite_scales(scales, codec, name)
        blocks[start : start + step] = codec.join(codec.encode(piece, scales), scales)
    return _tensor(blocks, codec, values.shape, name, scale)


def assemble(
    codec: Codec,
    codes: Bytes,
    scales: Floats,
    shape: tuple[int, ...],
    *,
    name: str = "",
    scale: float = 1.0,
) -> PackedTensor:
    """A tensor of ``shape`` from codes (groups, block) and scales (groups, k), row by row."""
    require_finite_scales(scales, codec, name)
    return _tensor(codec.join(codes, scales), codec, shape, name, scale)


def require_finite(values: npt.NDArray[np.floating], name: str) -> None:
    """Raise ``CheckpointError`` that names the tensor if it holds NaN or infinity."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name or 'a tensor'}: the weights hold NaN or infinity")


def require_finite_scales(scales: Floats, codec: Codec, name: str) -> None:
    """Raise ``OptionError`` that names the tensor if a scale overflowed."""
    if not np.isfinite(scales).all():
        raise OptionError(
            f"{name or 'a tensor'}: the weights are too large for the scales of "
            f"{codec.format.name}: choose another format"
        )


def require_whole_groups(columns: int, codec: Codec, name: str) -> None:
    """Raise ``OptionError`` that names the tensor if a row is not whole groups."""
    if columns % codec.format.block:
        raise OptionError(
            f"{name or 'a tensor'}: {columns} columns are not whole groups of "
            f"{codec.format.block}, as {codec.format.name} needs: choose a smaller group"
        )


def _tensor(
    blocks: Bytes, codec: Codec, shape: tuple[int, ...], name: str, scale: float
) -> PackedTensor:
    rows = shape[0] if len(shape) > 1 else 1
    return PackedTensor(name, codec.format, shape, blocks.reshape(rows, -1), scale)


def _cast(values: Floats, format_: Format, name: str) -> PackedTensor:
    rows = values.reshape(values.shape[0] if values.ndim > 1 else 1, -1)
    if format_ == BF16:
        packed = bf16_bits(rows)
        overflow = bool(((packed & 0x7FFF) == 0x7F80).any())
    else:
        with np.errstate(over="ignore"):
            packed = np.ascontiguousarray(rows, "<f4" if format_ == F32 else "<f2")
        overflow = not np.isfinite(packed).all()
    if overflow:
        raise OptionError(f"{name or 'a tensor'}: the weights are too large for {format_.name}")
    return PackedTensor(name, format_, values.shape, packed.view(np.uint8))


def bf16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """float32 as the bits of bf16: the upper half, rounded to nearest, ties to even; NaN stays."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    made = np.empty(flat.shape, "<u2")
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        bits = piece.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        made[start : start + _PIECE] = np.where(np.isnan(piece), 0x7FC0, rounded)
    return made.reshape(values.shape)


def bf16_values(bits: npt.NDArray[np.uint16]) -> Floats:
    """The inverse of ``bf16_bits``."""
    made = np.empty(bits.shape, np.float32)
    _unpack_bf16(np.ascontiguousarray(bits).view(np.uint8), made)
    return made


def unpack(tensor: PackedTensor) -> Floats:
    """The tensor's values, float32, of ``tensor.shape``.

    The result of an ``f32`` tensor shares the tensor's memory; any other is a new array.

    Raises:
        ValueError: no such format, or the data is not what the shape and format say.
    """
    format_ = tensor.format
    unpack_blocks = _UNPACK.get(format_.name)
    if format_.name != "f32" and unpack_blocks is None:
        raise ValueError(f"{tensor.name}: no way to unpack format {format_.name}")
    *leading, columns = tensor.shape or (1,)
    if tensor.data.dtype != np.uint8 or tensor.nbytes != math.prod(leading) * format_.row_bytes(
        columns
    ):
        raise ValueError(
            f"{tensor.name}: {tensor.nbytes} bytes do not hold {tensor.shape} in {format_.name}"
        )
    packed = np.ascontiguousarray(tensor.data)
    if unpack_blocks is None:
        whole = packed.reshape(-1).view("<f4").reshape(tensor.shape)
        return whole if tensor.scale == 1.0 else whole * np.float32(tensor.scale)
    blocks = packed.reshape(-1, format_.block_bytes)
    values = np.empty((len(blocks), format_.block), np.float32)
    step = _PIECE // format_.block
    with np.errstate(all="ignore"):  # scales of a damaged file may be infinite or NaN
        for start in range(0, len(blocks), step):
            unpack_blocks(blocks[start : start + step], values[start : start + step])
        if tensor.scale != 1.0:
            values *= np.float32(tensor.scale)
    return values.reshape(tensor.shape)


def _f16(blocks: Bytes, at: int) -> Floats:
    """The half at byte ``at`` of every block, as a column: (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _unpack_half(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _unpack_bf16(blocks: Bytes, out: Floats) -> None:
    # bfloat16 is the upper half of a float32
    np.left_shift(blocks.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def _unpack_f8(blocks: Bytes, out: Floats) -> None:
    np.take(E4M3, blocks, out=out)


def _unpack_affine(name: str, zero: int, blocks: Bytes, out: Floats) -> None:
    """``(code - zero) * scale``, plus or minus a minimum; a block has one or more groups."""
    scales, minima = _scales(name, blocks)  # (blocks, groups, 1)
    groups = out.reshape(*scales.shape[:2], -1)
    groups[:] = read_codes(name, blocks).reshape(groups.shape)
    if zero:
        groups -= zero
    groups *= scales
    if minima is not None:  # K-quants subtract theirs
        (np.subtract if name.endswith("_k") else np.add)(groups, minima, out=groups)


def _scales(name: str, blocks: Bytes) -> tuple[Floats, Floats | None]:
    if name in ("q4_k", "q5_k"):
        six = six_bit_scales(name, blocks[:, 4:16]).astype(np.float32)
        scales, least = _f16(blocks, 0) * six[:, :8], _f16(blocks, 2) * six[:, 8:]
        return scales[:, :, None], least[:, :, None]
    if name == "tq2_0":
        return _f16(blocks, 64)[:, None], None
    if name == "q6_k":
        scales = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
        return scales[:, :, None], None
    minima = _f16(blocks, 2)[:, None] if name in ("q4_1", "q5_1") else None
    return _f16(blocks, 0)[:, None], minima


def _unpack_iq4_xs(blocks: Bytes, out: Floats) -> None:
    six = six_bit_scales("iq4_xs", blocks[:, 2:8]).astype(np.float32) - 32
    scales = _f16(blocks, 0) * six
    np.take(IQ4_LEVELS, read_codes("iq4_xs", blocks), out=out)
    groups = out.reshape(*scales.shape, -1)
    groups *= scales[:, :, None]


def _unpack_codebook(name: str, blocks: Bytes, out: Floats) -> None:
    book, fields = CODEBOOKS[name], split_fields(name, blocks)
    entries = book.entries[fields.index].astype(np.float32)  # (blocks, indices, width)
    if book.shifted:
        entries = 8 * entries - 7 - 2 * fields.signs[:, :, None]
    else:
        entries *= (1 - 2 * fields.signs.astype(np.float32)).reshape(entries.shape)
    d = fields.d.view(np.float16).astype(np.float32)[:, None]
    scales = d * (book.unit * (2 * fields.scale.astype(np.float32) + 1))
    groups = out.reshape(*scales.shape, -1)
    np.multiply(entries.reshape(groups.shape), scales[:, :, None], out=groups)


# e2m1 doubled to be integers; the scale is halved
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_E8M0_HALF = np.ldexp(np.float32(1), np.arange(-128, 128)).astype(np.float32)


def _unpack_mxfp4(blocks: Bytes, out: Floats) -> None:
    np.take(_E2M1, read_codes("mxfp4", blocks), out=out)
    out *= _E8M0_HALF[blocks[:, :1]]


_UNPACK: Mapping[str, Callable[[Bytes, Floats], None]] = MappingProxyType(
    {
        **{name: unpack_blocks_of(codec) for name, codec in GROUP_CODECS.items()},
        **{
            format_.name: partial(_unpack_affine, format_.name, format_.zero)
            for format_ in GGML_FORMATS.values()
            if format_.zero is not None
        },
        "bf16": _unpack_bf16,
        "f16": _unpack_half,
        "f8_e4m3": _unpack_f8,
        "mxfp4": _unpack_mxfp4,
        "iq4_xs": _unpack_iq4_xs,
        **{name: partial(_unpack_codebook, name) for name in CODEBOOKS},
    }
)
