"""Where the GPU's kernels are tested: on a CUDA GPU, else on the CPU."""

from __future__ import annotations

import torch

from localrt.quant.cuda.kv import BlockedCache
from localrt.quant.cuda.launch import emulate
from localrt.quant.cuda.products import TiledMatrix
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.tiled import tile
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from tests.ops.cuda.emulator import Emulator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    emulate(Emulator())


def tiles_of(tensor: PackedTensor) -> TiledMatrix:
    """A packed matrix as the kernels take it."""
    data = torch.from_numpy(tile(tensor)).to(DEVICE)
    shape = (tensor.shape[0], tensor.shape[1])
    count = -(-shape[0] // 16)
    factor = None if tensor.scale == 1.0 else torch.full((count,), tensor.scale, device=DEVICE)
    return TiledMatrix(tensor.format.name, shape, data, factor)


def cache_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[BlockedCache, torch.Tensor]:
    """A cache of one layer with these (heads, allocated, size) in it, and its blocks' addresses."""
    (heads, allocated, key), value = keys.shape, values.shape[2]
    cache = BlockedCache([(heads, key, value)], allocated, keys.dtype, keys.device)
    cache.reserve(allocated)
    for number, parts in enumerate(cache.parts(0)):
        for part, given in zip(parts, (keys, values), strict=True):
            here = given[:, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            part[:, : here.shape[1]] = here
    return cache, torch.from_numpy(cache.addresses).to(keys.device)


def kept(cache: BlockedCache, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Its first keys and values, (heads, length, size)."""
    keys, values = (torch.cat(parts, 1) for parts in zip(*cache.parts(0), strict=True))
    return keys[:, :length], values[:, :length]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers on the CPU, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
