"""A sequence's KV cache on a GPU, in blocks of 256 tokens; a block has all layers.

A cache grows by whole blocks, and tokens never move. The blocks' addresses are an input of each
pass, so a recorded pass serves all caches of a model. A block has each layer's keys, (heads, 256,
key), then its values, one layer after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.launch import arguments, launch, pointers
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import UINT8, Dtype, Tensor, upload, zeros
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.ops.kv import GrowingCache, ReadBlocks, grown_capacity, read_pieces
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.protocol import Span

_LEAST_BLOCKS = 16  # recorded passes have room for 4,096 tokens or more
_THREADS = 256

_MoveTokens = arguments("move_tokens.cu", "MoveTokens")


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer's place in each block: byte offsets of its keys and values, for ``heads`` heads. A
    key has ``key`` elements of the cache's type, a value ``value``.
    """

    keys_at: int
    values_at: int
    heads: int
    key: int
    value: int


class BlockedCache(GrowingCache):
    """See ``KVCache``. ``shapes`` gives (kv heads, key size, value size) per layer, in elements of
    ``dtype``. ``addresses`` are those of the blocks, on ``device``.
    """

    grows_in_place = True

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        capacity: int,
        dtype: Dtype,
        device: Device,
    ) -> None:
        super().__init__(capacity)
        self._dtype, self._device = dtype, device
        self._shapes = list(shapes)
        # Heads and bytes of a row: a layer's keys, its values, the next layer's keys.
        parts = [(heads, n * dtype.itemsize) for heads, *sizes in shapes for n in sizes]
        starts = list(accumulate((BLOCK_TOKENS * heads * n for heads, n in parts), initial=0))
        self.layers = [
            LayerPlace(starts[2 * n], starts[2 * n + 1], *shape) for n, shape in enumerate(shapes)
        ]
        self._step = starts[-1]
        self._alike: list[tuple[int, int, int]] = []  # runs of equal parts: first row, heads, bytes
        for size, same in groupby(zip(starts, parts, strict=False), lambda part: part[1][1]):
            found = list(same)
            if (count := sum(heads for _, (heads, _) in found)) and size:
                self._alike.append((found[0][0], count, size))
        self._blocks: list[Tensor] = []
        self.addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self._step

    @property
    def kv_layout(self) -> str:
        shapes = "+".join(
            f"{len(list(same))}x{heads}x{key}x{value}"
            for (heads, key, value), same in groupby(self._shapes)
        )
        return f"blocks 1 {self._dtype} {shapes}"

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 tokens in all layers."""
        return self._step

    @property
    def room(self) -> int:
        """The number of blocks for which a pass is recorded: rounded up, so that it rarely changes
        as the cache grows.
        """
        doubled = 1 << (len(self._blocks) - 1).bit_length()
        return min(max(doubled, _LEAST_BLOCKS), grown_capacity(self._capacity) // BLOCK_TOKENS)

    def parts(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A layer's keys and values in each block, (heads, 256, key or value), in place."""
        place = self.layers[layer]
        for block in self._blocks:
            found = (
                block[at : at + place.heads * BLOCK_TOKENS * size * self._dtype.itemsize]
                .typed(self._dtype)
                .view(place.heads, BLOCK_TOKENS, size)
                for at, size in ((place.keys_at, place.key), (place.values_at, place.value))
            )
            keys, values = found
            yield keys, values

    def take_blocks(self, first: int, count: int) -> Bytes:
        """A copy in RAM, (count, block_bytes)."""
        taken = np.empty((count, self._step), np.uint8)
        for room, block in zip(taken, self._blocks[first : first + count], strict=True):
            block.device.copy_out(room, block.address)
        self._device.synchronize()
        return taken

    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        for start, blocks in read_pieces(first, count, self._step, read):
            for number, data in enumerate(blocks, start):
                self._blocks[number].put(data)

    def _grow(self, size: int) -> None:
        while len(self._blocks) < size // BLOCK_TOKENS:
            # Zeros, since the unused end of the last block is saved too.
            block = zeros(
                self._step, dtype=UINT8, device=self._device, pool=self._device.persistent
            )
            self._blocks.append(block)
            self.addresses = np.append(self.addresses, block.address)

    def _move(self, first: int, rows: Sequence[int]) -> None:
        """Move tokens one after another: indices ascend, so none is overwritten before it has
        moved.
        """
        if not self._alike:
            return
        moves = list[int]()
        for target, source in enumerate((first + row for row in rows), first):
            if source != target:
                old, new = divmod(source, BLOCK_TOKENS), divmod(target, BLOCK_TOKENS)
                moves += [self.addresses[old[0]], old[1], self.addresses[new[0]], new[1]]
        numbers = upload(np.array([*chain(*self._alike), *moves], np.int64), self._device)
        parts, there = pointers(numbers, numbers[3 * len(self._alike) :])
        args = _MoveTokens(parts, there, len(moves) // 4)
        words = max(heads * size // 4 for _, heads, size in self._alike)
        grid = (-(-words // _THREADS), len(self._alike), 1)
        launch(self._device, Program.of("move_tokens"), grid, _THREADS, args)


def blocks_of(span: Span) -> BlockedCache:
    """A sequence's keys and values."""
    cache = span.cache
    if isinstance(cache, HybridCache):
        cache = cache.kv
    assert isinstance(cache, BlockedCache), "caches and steps belong to one implementation"
    return cache
