"""Float32 weights to packed bytes, rounded to nearest: the plain reference for packing.

``pack`` takes each group's range for its scale. A quantizer that knows better scales or codes calls
``assemble``. Neither knows where weights come from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, OptionError
from localrt.quant.formats.catalog import CODECS
from localrt.quant.formats.ggml import BF16, F16, F32
from localrt.quant.formats.packed import Bytes, Codec, Floats, Format, PackedTensor

_PIECE = 1 << 16  # weights packed at a time


def codec_of(format_: Format) -> Codec:
    """The codec of one of our own formats.

    Raises:
        OptionError: localrt reads the format at most, and does not quantize to it.
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
        bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
        # The upper half, rounded to nearest, ties to even.
        packed = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        overflow = bool(((packed & 0x7FFF) == 0x7F80).any())
    else:
        with np.errstate(over="ignore"):
            packed = np.ascontiguousarray(rows, "<f4" if format_ == F32 else "<f2")
        overflow = not np.isfinite(packed).all()
    if overflow:
        raise OptionError(f"{name or 'a tensor'}: the weights are too large for {format_.name}")
    return PackedTensor(name, format_, values.shape, packed.view(np.uint8))
