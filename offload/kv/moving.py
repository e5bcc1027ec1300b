"""Moving rows of a layer on the SSD: what verification keeps of a tree, side by side.

The few blocks concerned are gathered in RAM, changed there, and the full ones written again. It
does not know which layers are on the SSD, nor their buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localrt.offload.kv.file import Bytes, KvFile
from localrt.offload.kv.tasks import IoThread
from localrt.quant.ops.native.kv import BLOCK, KVFormat, block_nbytes, map_zeros
from localrt.quant.ops.native.kv_select import move_rows

__all__ = ["Kept", "move_stored"]


class Kept(Protocol):
    """Where one layer's tokens are: ``saved`` of them in the file, then the block ``tail``."""

    offset: int
    stride: int
    tail: Bytes
    saved: int


def move_stored(
    layer: Kept,
    file: KvFile,
    io: IoThread,
    shape: tuple[int, int],
    kv_format: KVFormat,
    first: int,
    rows: Sequence[int],
) -> int:
    """Put token ``first + rows[i]`` where token ``first + i`` is; returns the first block changed.

    What lies behind those tokens is lost. ``shape`` is (kv heads, head size).

    Raises:
        StorageError: the disk fails. Tokens from ``first`` on are lost.
    """
    begin, stop = first // BLOCK, (first + rows[-1]) // BLOCK + 1
    stride, at = layer.stride, layer.offset + begin * layer.stride
    blocks = map_zeros((stop - begin) * stride)
    in_file = min(stop, -(-layer.saved // BLOCK)) - begin
    if in_file > 0:
        task = io.start(lambda: file.read_into(at, blocks[: in_file * stride]))
        task.wait()
        if task.error is not None:
            raise task.error
    if begin + max(in_file, 0) < stop:
        behind = max(in_file, 0) * stride
        blocks[behind : behind + stride] = layer.tail
    size = block_nbytes(*shape, kv_format)
    view = blocks.reshape(stop - begin, 1, stride)[:, :, :size]
    move_rows(view, *shape, kv_format, first - begin * BLOCK, rows)
    end = first + len(rows)
    full = end // BLOCK - begin
    if full > 0:
        task = io.start(lambda: file.write(at, blocks[: full * stride]))
        task.wait()
        if task.error is not None:
            raise task.error
    if end % BLOCK:
        layer.tail[:] = blocks[full * stride : (full + 1) * stride]
    layer.saved = end // BLOCK * BLOCK
    return begin
