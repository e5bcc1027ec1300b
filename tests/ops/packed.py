"""Random packed tensors with sane scales, for every format that the kernels read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from localrt.quant.formats import FORMATS, PUBLISHED, PackedTensor, ZeroPointCodec
from localrt.quant.formats.codebook import CODEBOOKS, join_fields, split_fields

# Of the last two bytes of a block.
_SCALES_AT = {"q3_k": 108, "q6_k": 208, "tq2_0": 64}


def _give_scales(
    name: str, blocks: np.ndarray, scales: np.ndarray, rng: np.random.Generator
) -> None:
    """Put ``scales`` (rows, groups, 2) and what goes with them into random blocks."""
    codec = PUBLISHED[name]
    flat = blocks.reshape(-1, codec.format.block_bytes)
    codes, old = codec.split(flat)
    found = scales.reshape(-1, 2)[:, : old.shape[1]].copy()
    if isinstance(codec, ZeroPointCodec):
        found[:, 1] = rng.integers(0, 1 << codec.bits, len(found))
    if name.startswith("e4m3"):
        codes[codes & 127 == 127] = 0  # not a number
    flat[...] = codec.join(codes, found)


def random_tensor(
    name: str, rows: int, cols: int, seed: int = 0, factor: float = 1.0
) -> PackedTensor:
    """(rows, cols) in the format called ``name``: random codes, scales near 0.01, which have the
    bits of float16 times ``factor`` where they are float32.
    """
    rng = np.random.default_rng(seed)
    format_ = FORMATS[name]
    values = rng.standard_normal((rows, cols), np.float32)
    if name == "f32":
        data = values.view(np.uint8)
    elif name == "f16":
        data = values.astype(np.float16).view(np.uint8)
    elif name == "bf16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        data = rng.integers(0, 256, (rows, format_.row_bytes(cols)), dtype=np.uint8)
        blocks = data.reshape(rows, cols // format_.block, format_.block_bytes)
        scales = rng.uniform(0.002, 0.02, (*blocks.shape[:2], 2)).astype(np.float16)
        if name == "nvfp4":
            blocks[:, :, 0] = rng.integers(8, 60, blocks.shape[:2])
        elif name in PUBLISHED:
            _give_scales(name, blocks, scales.astype(np.float32) * np.float32(factor), rng)
        elif name == "mxfp4":
            blocks[:, :, 0] = rng.integers(118, 124, blocks.shape[:2])
        elif name == "q2_k":
            blocks[:, :, 80:] = scales.view(np.uint8)
        elif name in CODEBOOKS:
            fields = split_fields(name, blocks.reshape(-1, format_.block_bytes))
            d = scales.view(np.uint16)[:, :, 0].reshape(-1)
            blocks[:] = join_fields(name, replace(fields, d=d)).reshape(blocks.shape)
        elif name in _SCALES_AT:
            blocks[:, :, _SCALES_AT[name] :] = scales[:, :, :1].view(np.uint8)
        else:
            blocks[:, :, :2] = scales[:, :, :1].view(np.uint8)
            minimum = name.startswith("int") and name.endswith("m")
            if minimum or name in ("q4_1", "q5_1", "q4_k", "q5_k"):
                blocks[:, :, 2:4] = scales[:, :, 1:].copy().view(np.uint8)
    scale = 0.37 if name == "nvfp4" else 1.0
    return PackedTensor(name, format_, (rows, cols), np.ascontiguousarray(data), scale)
