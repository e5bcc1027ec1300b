"""FP8 weights: E4M3 or E5M2 codes, and a scale for the tensor, its rows, or blocks of it.

DeepSeek and Qwen publish blocks of 128 x 128 with ``weight_scale_inv``, which is multiplied like
any other scale. E4M3 keeps its byte; E5M2, which nobody publishes models in, becomes float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localrt.models.checkpoints.published.coded_rows import (
    CodedRows,
    Decoded,
    Floats,
    Grid,
    group_of,
    weight_info,
)
from localrt.models.checkpoints.published.weights import require_shape, wrong
from localrt.models.checkpoints.safetensors_header import E5M2
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource, StoredTensor
from localrt.quant.formats import F8_E4M3, E4m3Codec, Format, GroupCodec
from localrt.quant.formats.published import GROUPS

__all__ = ["fp8_rows"]


def fp8_rows(
    name: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None
) -> RowSource:
    """The matrix ``name``; ``block`` is (rows, columns) that share a scale, if the config says.

    Raises:
        CheckpointError: no matrix in FP8, or scales that do not fit it.
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
    """The upper half of a float16: see ``GroupCodec``."""

    format: Format = E5M2

    def decode(self, codes: Bytes, scales: Floats) -> Floats:
        values = (codes.astype("<u2") << 8).view("<f2").astype(np.float32)
        return values * scales

    def join(self, codes: Bytes, scales: Floats) -> Bytes:
        raise NotImplementedError

    def split(self, blocks: Bytes) -> tuple[Bytes, Floats]:
        raise NotImplementedError
