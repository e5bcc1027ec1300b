"""Keys and values in blocks: they never move as a cache grows, and are saved as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localrt.quant.cuda.kv import BlockedCache
from localrt.quant.cuda.tensor import BFLOAT16
from localrt.quant.ops.kv import held_blocks
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from tests.ops.cuda.target import DEVICE, back, random, there

SHAPES = [(2, 8, 8), (2, 8, 8), (0, 0, 0), (1, 24, 0), (3, 16, 4)]


@pytest.fixture
def cache() -> BlockedCache:
    return BlockedCache(SHAPES, 1000, BFLOAT16, DEVICE)


def contents(cache: BlockedCache, layer: int) -> list[torch.Tensor]:
    """Keys and values, (heads, allocated, size)."""
    return [
        torch.cat([back(part) for part in parts], 1)
        for parts in zip(*cache.parts(layer), strict=True)
    ]


def fill(cache: BlockedCache) -> list[list[torch.Tensor]]:
    """Put other numbers everywhere; returns a copy of them by layer."""
    for layer in range(len(SHAPES)):
        for number, parts in enumerate(cache.parts(layer)):
            for part in parts:
                part.put(there(random(*part.shape, seed=10 * layer + number).bfloat16()))
    return [contents(cache, layer) for layer in range(len(SHAPES))]


def test_growth(cache: BlockedCache) -> None:
    cache.reserve(300)
    before, addresses = fill(cache), cache.addresses.copy()
    assert len(addresses) == 2
    assert cache.nbytes == 2 * cache.block_bytes
    cache.reserve(1000)
    assert cache.allocated == 4 * BLOCK_TOKENS
    assert np.array_equal(cache.addresses[:2], addresses)
    for layer, parts in enumerate(before):
        for now, was in zip(contents(cache, layer), parts, strict=True):
            assert torch.equal(now[:, :512], was)
            assert not now[:, 512:].any()


def test_layers_lie_one_after_another(cache: BlockedCache) -> None:
    cache.reserve(1)
    sizes = [heads * (key + value) for heads, key, value in SHAPES]
    assert cache.block_bytes == 2 * BLOCK_TOKENS * sum(sizes)
    (address,) = cache.addresses
    for layer, place in enumerate(cache.layers):
        ((keys, values),) = cache.parts(layer)
        if keys.size:
            assert keys.address == address + place.keys_at
        if values.size:
            assert values.address == address + place.values_at


def test_saved_blocks(cache: BlockedCache) -> None:
    cache.reserve(600)
    before = fill(cache)
    saved = cache.take_blocks(0, 3)
    assert saved.shape == (3, cache.block_bytes)
    again = BlockedCache(SHAPES, 1000, BFLOAT16, DEVICE)
    again.reserve(600)
    again.fill_blocks(0, 3, held_blocks(saved))
    assert again.restore(600, ()) == again.length == 600
    assert again.kv_layout == cache.kv_layout
    for layer, parts in enumerate(before):
        for now, was in zip(contents(again, layer), parts, strict=True):
            assert torch.equal(now, was)


@pytest.mark.parametrize(
    ("first", "rows"),
    [(10, [0, 2, 5]), (250, [0, 1, 5, 6, 7, 9]), (254, [1, 300]), (250, list(range(1, 20)))],
)
def test_selected_rows(cache: BlockedCache, first: int, rows: list[int]) -> None:
    """Within a block, from one into another, and to where tokens lie that move too."""
    cache.reserve(600)
    before = fill(cache)
    cache.advance(600)
    cache.select(first, rows)
    assert cache.length == first + len(rows)
    for layer, parts in enumerate(before):
        for now, was in zip(contents(cache, layer), parts, strict=True):
            assert torch.equal(now[:, :first], was[:, :first])
            assert torch.equal(now[:, first : cache.length], was[:, [first + row for row in rows]])


def test_room_of_recorded_passes(cache: BlockedCache) -> None:
    long = BlockedCache([(1, 8, 8)], 100_000, BFLOAT16, DEVICE)
    cache.reserve(1)
    assert cache.room == 4  # there will not be more
    rooms = list[int]()
    for length in range(256, 20_000, 256):
        long.reserve(length)
        rooms.append(long.room)
        assert long.room >= len(long.addresses)
    assert sorted(set(rooms)) == [16, 32, 64, 128]
