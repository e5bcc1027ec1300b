"""Tiles of E4M3 codes as bf16, on the device: there is no kernel that multiplies them."""

from __future__ import annotations

import torch
from torch import Tensor

from localrt.quant.formats.published import E4m3Codec
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor


def is_e4m3_groups(block: TiledTensor) -> bool:
    """Whether a matrix is E4M3 codes in groups."""
    format_ = block.format
    return format_.name.startswith("e4m3-") and format_ == E4m3Codec(format_.block).format


def unpack_e4m3(block: TiledTensor, data: Tensor) -> Tensor:
    """``block`` (rows, columns) in bf16, from its tiles in ``data``, uint8."""
    rows, columns = block.shape
    group = block.format.block
    spans = data.view(-1, columns // group, TILE_ROWS * block.format.block_bytes)
    head = 4 * TILE_ROWS
    scales = spans[..., :head].contiguous().view(torch.float32)  # (tiles, spans, 16)
    codes = spans[..., head:].contiguous().view(torch.float8_e4m3fn)
    codes = codes.view(*scales.shape[:2], group // 4, TILE_ROWS, 4)
    values = codes.float() * (scales * block.scale)[:, :, None, :, None]
    whole = values.permute(0, 3, 1, 2, 4).reshape(-1, columns)  # tiles, rows of one, columns
    return whole[:rows].to(torch.bfloat16)
