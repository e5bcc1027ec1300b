"""A sequence's keys and values on a GPU: blocks of 256 tokens, each with all layers.

A cache grows by whole blocks, and what it holds never moves. Kernels find a token by the addresses
of the blocks, which each pass brings along: so a recorded pass serves all caches of a model. In a
block lie each layer's keys, (heads, 256, key), and its values, one layer after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.ops.kv import GrowingCache, ReadBlocks, grown_capacity, read_pieces
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.protocol import Span

_LEAST_BLOCKS = 16  # of recorded passes: 4,096 tokens


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer lies in each block: bytes before its keys and before its values, of ``heads``
    heads. A key has ``key`` elements of the cache's type, a value ``value``.
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
        dtype: torch.dtype,
        device: torch.device,
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
        self._alike: list[tuple[int, int, int]] = []  # neighbours: their start, heads, bytes
        for size, same in groupby(zip(starts, parts, strict=False), lambda part: part[1][1]):
            found = list(same)
            self._alike.append((found[0][0], sum(heads for _, (heads, _) in found), size))
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
        return f"blocks 1 {self._dtype} {shapes}".replace("torch.", "")

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 tokens in all layers."""
        return self._step

    @property
    def room(self) -> int:
        """Blocks that a recorded pass has room for: its number rarely changes as the cache grows,
        since each has kernels of other sizes.
        """
        doubled = 1 << (len(self._blocks) - 1).bit_length()
        return min(max(doubled, _LEAST_BLOCKS), grown_capacity(self._capacity) // BLOCK_TOKENS)

    def parts(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A layer's keys and values in each block, (heads, 256, key or value), in place."""
        place = self.layers[layer]
        for block in self._blocks:
            found = (
                block[at : at + place.heads * BLOCK_TOKENS * size * self._dtype.itemsize]
                .view(self._dtype)
                .view(place.heads, BLOCK_TOKENS, size)
                for at, size in ((place.keys_at, place.key), (place.values_at, place.value))
            )
            keys, values = found
            yield keys, values

    def keys(self, layer: int, length: int) -> Tensor:
        """A copy of a layer's first keys, (heads, length, key)."""
        return torch.cat([keys for keys, _ in self.parts(layer)], 1)[:, :length]

    def take_blocks(self, first: int, count: int) -> Bytes:
        """A copy in RAM, (count, block_bytes)."""
        taken = np.empty((count, self._step), np.uint8)
        for room, block in zip(taken, self._blocks[first : first + count], strict=True):
            torch.from_numpy(room).copy_(block)
        return taken

    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        with torch.inference_mode():
            for start, blocks in read_pieces(first, count, self._step, read):
                for number, data in enumerate(blocks, start):
                    self._blocks[number].copy_(torch.from_numpy(data))

    def _grow(self, size: int) -> None:
        while len(self._blocks) < size // BLOCK_TOKENS:
            # Zeros: the end of the last block is saved too.
            block = torch.zeros(self._step, dtype=torch.uint8, device=self._device)
            self._blocks.append(block)
            self.addresses = np.append(self.addresses, block.data_ptr())

    def _move(self, first: int, rows: Sequence[int]) -> None:
        sources = _by_block([first + row for row in rows])
        targets = _by_block(range(first, first + len(rows)))
        with torch.inference_mode():
            wanted = [(n, torch.tensor(tokens, device=self._device)) for n, tokens in sources]
            for start, heads, size in self._alike:

                def rows_of(number: int, at: int = start, h: int = heads, e: int = size) -> Tensor:
                    block = self._blocks[number][at : at + h * BLOCK_TOKENS * e]
                    return block.view(h, BLOCK_TOKENS, e)

                moved = torch.cat([rows_of(n)[:, index] for n, index in wanted], 1)
                for number, tokens in targets:
                    here, moved = moved[:, : len(tokens)], moved[:, len(tokens) :]
                    rows_of(number)[:, tokens[0] : tokens[-1] + 1] = here


def _by_block(tokens: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Ascending tokens by block: its number, and their places in it."""
    return [
        (number, [token % BLOCK_TOKENS for token in same])
        for number, same in groupby(tokens, lambda token: token // BLOCK_TOKENS)
    ]


def blocks_of(span: Span) -> BlockedCache:
    """A sequence's keys and values."""
    cache = span.cache
    if isinstance(cache, HybridCache):
        cache = cache.kv
    assert isinstance(cache, BlockedCache), "caches and steps belong to one implementation"
    return cache
