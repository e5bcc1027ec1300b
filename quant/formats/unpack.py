"""Packed bytes to float32: the plain reference that kernels on packed weights are checked against.

Follows ggml's block layouts and its order of operations, so results are bitwise ggml's own; our own
formats are decoded by their codecs. Works through a tensor in pieces that stay in the CPU cache;
nothing but the result is ever large. Knows nothing of shapes beyond rows of whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.catalog import CODECS
from localrt.quant.formats.codec import unpack_blocks_of
from localrt.quant.formats.packed import PackedTensor

__all__ = ["unpack"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

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


def _nibbles(packed: Bytes, out: Floats | Bytes) -> None:
    """Low nibbles fill the first half of the last axis, high nibbles the second."""
    half = packed.shape[-1]
    out[..., :half] = packed & 15
    out[..., half:] = packed >> 4


def _unpack_half(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _unpack_bf16(blocks: Bytes, out: Floats) -> None:
    # bfloat16 is the upper half of a float32
    np.left_shift(blocks.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def _unpack_q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _f16(blocks, 0)


def _unpack_q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _f16(blocks, 0)
    out += _f16(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Unsigned 5-bit values (blocks, 32) of 4 bytes of high bits and 16 of nibbles."""
    values = np.unpackbits(high, axis=1, bitorder="little")
    values <<= 4
    values[:, :16] |= low & 15
    values[:, 16:] |= low >> 4
    return values


def _unpack_q5_0(blocks: Bytes, out: Floats) -> None:
    out[:] = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    out -= 16
    out *= _f16(blocks, 0)


def _unpack_q5_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= _f16(blocks, 0)
    out += _f16(blocks, 2)


def _unpack_q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _f16(blocks, 0)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 groups of a Q4_K or Q5_K block: (blocks, 8, 1) each.

    Twelve bytes hold 6 bits of each: groups 0-3 plainly in bytes 0-3 (scales) and 4-7 (minima);
    groups 4-7 take their low nibbles from bytes 8-11 and their high bits from the tops of 0-7.
    """
    scale, minimum, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([scale & 63, (low & 15) | ((scale >> 2) & 48)], axis=1)
    minima = np.concatenate([minimum & 63, (low >> 4) | ((minimum >> 2) & 48)], axis=1)
    d, m = _f16(blocks, 0) * scales.astype(np.float32), _f16(blocks, 2) * minima.astype(np.float32)
    return d[:, :, None], m[:, :, None]


def _unpack_q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    groups = out.reshape(-1, 8, 32)
    groups *= scales
    groups -= minima


def _unpack_q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    # byte i of the high bits holds bit 4 of weight i of each of the 8 groups
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    values = np.empty((len(blocks), 4, 64), np.uint8)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), values)
    groups = out.reshape(-1, 8, 32)
    groups[:] = values.reshape(-1, 8, 32) | (high << 4)
    groups *= scales
    groups -= minima


def _unpack_q6_k(blocks: Bytes, out: Floats) -> None:
    values = np.empty((len(blocks), 2, 128), np.uint8)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), values)
    quarters = values.reshape(-1, 2, 4, 32)  # each half block: 4 runs of 32 share 32 high bytes
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    quarters |= (high & 3) << 4
    scales = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    groups = out.reshape(-1, 16, 16)
    groups[:] = values.reshape(-1, 16, 16)
    groups -= 32
    groups *= scales[:, :, None]


# e2m1 doubled, so that it is whole, times half of the scale
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_E8M0_HALF = np.ldexp(np.float32(1), np.arange(-128, 128)).astype(np.float32)


def _unpack_mxfp4(blocks: Bytes, out: Floats) -> None:
    values = np.empty(out.shape, np.uint8)
    _nibbles(blocks[:, 1:], values)
    np.take(_E2M1, values, out=out)
    out *= _E8M0_HALF[blocks[:, :1]]


_UNPACK: Mapping[str, Callable[[Bytes, Floats], None]] = MappingProxyType(
    {
        **{name: unpack_blocks_of(codec) for name, codec in CODECS.items()},
        "bf16": _unpack_bf16,
        "f16": _unpack_half,
        "mxfp4": _unpack_mxfp4,
        "q4_0": _unpack_q4_0,
        "q4_1": _unpack_q4_1,
        "q4_k": _unpack_q4_k,
        "q5_0": _unpack_q5_0,
        "q5_1": _unpack_q5_1,
        "q5_k": _unpack_q5_k,
        "q6_k": _unpack_q6_k,
        "q8_0": _unpack_q8_0,
    }
)
