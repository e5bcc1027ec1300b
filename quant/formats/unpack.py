"""Packed bytes to float32: the plain reference that kernels on packed weights are checked against.

Follows ggml's block layouts and its order of operations, so results are bitwise ggml's own; our own
formats are decoded by their codecs. Works through a tensor in pieces that stay in the CPU cache;
nothing but the result is ever large. Knows nothing of shapes beyond rows of whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from localrt.quant.formats.catalog import GROUP_CODECS, read_codes
from localrt.quant.formats.codebook import CODEBOOKS, split_fields
from localrt.quant.formats.fp4 import E4M3
from localrt.quant.formats.ggml import IQ4_LEVELS
from localrt.quant.formats.packed import Bytes, Floats, PackedTensor, unpack_blocks_of
from localrt.quant.formats.six_bits import six_bit_scales

_PIECE = 1 << 16  # weights unpacked at a time: 256 KiB of results


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
    with np.errstate(all="ignore"):  # scales of a damaged file may be infinite or not numbers
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
        return (_f16(blocks, 0) * six[:, :8])[:, :, None], (_f16(blocks, 2) * six[:, 8:])[
            :, :, None
        ]
    if name == "q2_k":
        scales = _f16(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
        least = _f16(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
        return scales[:, :, None], least[:, :, None]
    if name == "q3_k":
        signed = six_bit_scales(name, blocks[:, 96:108]).astype(np.float32) - 32
        return (_f16(blocks, 108) * signed)[:, :, None], None
    if name == "tq2_0":
        return _f16(blocks, 64)[:, None], None
    if name == "q6_k":
        scales = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
        return scales[:, :, None], None
    minima = _f16(blocks, 2)[:, None] if name in ("q4_1", "q5_1") else None
    return _f16(blocks, 0)[:, None], minima


def _unpack_iq4(name: str, blocks: Bytes, out: Floats) -> None:
    scales = _f16(blocks, 0)
    if name == "iq4_xs":
        scales = scales * (six_bit_scales(name, blocks[:, 2:8]).astype(np.float32) - 32)
    np.take(IQ4_LEVELS, read_codes(name, blocks), out=out)
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


# e2m1 doubled, so that it is whole, times half of the scale
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_E8M0_HALF = np.ldexp(np.float32(1), np.arange(-128, 128)).astype(np.float32)


def _unpack_mxfp4(blocks: Bytes, out: Floats) -> None:
    np.take(_E2M1, read_codes("mxfp4", blocks), out=out)
    out *= _E8M0_HALF[blocks[:, :1]]


_ZEROS = {
    "q4_0": 8,
    "q4_1": 0,
    "q5_0": 16,
    "q5_1": 0,
    "q8_0": 128,
    "q2_k": 0,
    "q3_k": 4,
    "q4_k": 0,
    "q5_k": 0,
    "q6_k": 32,
    "tq2_0": 1,
}

_UNPACK: Mapping[str, Callable[[Bytes, Floats], None]] = MappingProxyType(
    {
        **{name: unpack_blocks_of(codec) for name, codec in GROUP_CODECS.items()},
        **{name: partial(_unpack_affine, name, zero) for name, zero in _ZEROS.items()},
        "bf16": _unpack_bf16,
        "f16": _unpack_half,
        "f8_e4m3": _unpack_f8,
        "mxfp4": _unpack_mxfp4,
        **{name: partial(_unpack_iq4, name) for name in ("iq4_nl", "iq4_xs")},
        **{name: partial(_unpack_codebook, name) for name in CODEBOOKS},
    }
)
