"""gpt-oss's experts as published, in MXFP4: blocks and scales in two tensors, as rows of ours.

``..._blocks`` (experts, rows, groups, 16) has two neighbouring columns in each byte, the first in
its low nibble; ``..._scales`` (experts, rows, groups) the exponents. Our block, which is ggml's
(``formats/fp4.py``), is the exponent and 16 bytes with columns j and j + 16: bits move, no value
changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from localrt.errors import CheckpointError
from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.expert_stacks import Stack, check_stack
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource, StoredTensor
from localrt.quant.formats import MXFP4

__all__ = ["split_mxfp4"]

_HALF = MXFP4.block // 2  # bytes of a group's nibbles


def split_mxfp4(
    blocks: StoredTensor, scales: StoredTensor, stack: Stack, prefix: str, count: int | None
) -> Iterator[RowSource]:
    """Every expert's matrices out of the two tensors.

    Raises:
        CheckpointError: their shapes are not those of so many experts.
    """
    experts = check_stack(blocks.info, 4, count)
    _, rows, groups, width = blocks.info.shape
    parts = len(stack.names)
    if width != _HALF or rows % parts or scales.info.shape != blocks.info.shape[:3]:
        raise CheckpointError(
            f"tensors {blocks.info.name!r} {blocks.info.shape} and {scales.info.name!r} "
            f"{scales.info.shape} are not MXFP4 weights in groups of {MXFP4.block}"
        )
    shape = (rows // parts, groups * MXFP4.block)
    nbytes = shape[0] * MXFP4.row_bytes(shape[1])
    for expert in range(experts):
        for part, name in enumerate(stack.names):
            info = TensorInfo(prefix + name.format(expert), shape, MXFP4, nbytes)
            yield _Mxfp4Rows(info, blocks, scales, expert * rows + part, parts)


@dataclass(frozen=True, slots=True)
class _Mxfp4Rows(RowSource):
    """Rows ``first``, ``first + step``, ... of the two tensors, counted over all experts."""

    nibbles: StoredTensor
    scales: StoredTensor
    first: int
    step: int

    def _read(self, start: int, stop: int) -> Bytes:
        count, groups = stop - start, self.info.shape[1] // MXFP4.block
        out = np.empty((count, groups, MXFP4.block_bytes), np.uint8)
        out[:, :, 0] = self._rows(self.scales, start, stop, groups)
        pairs = self._rows(self.nibbles, start, stop, groups * _HALF)
        pairs = pairs.reshape(count, groups, _HALF)
        low, high = pairs[:, :, : _HALF // 2], pairs[:, :, _HALF // 2 :]
        out[:, :, 1::2] = (low & 15) | (high << 4)  # even columns
        out[:, :, 2::2] = (low >> 4) | (high & 0xF0)  # odd ones
        return out

    def _rows(self, tensor: StoredTensor, start: int, stop: int, width: int) -> Bytes:
        """(stop - start, width) bytes, from the one range of the file that holds them."""
        first, last = self.first + start * self.step, self.first + (stop - 1) * self.step
        data = tensor.file.read(tensor.offset + first * width, (last - first + 1) * width)
        return data.reshape(-1, width)[:: self.step]
