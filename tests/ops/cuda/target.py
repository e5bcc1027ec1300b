"""Where the GPU's kernels are tested: on a CUDA GPU, else on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.driver import count_gpus, device_of
from localrt.quant.cuda.kv import BlockedCache
from localrt.quant.cuda.products import TiledMatrix
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, INT16, INT32, INT64, UINT8, Tensor, upload
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.tiled import tile
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from tests.ops.cuda.emulator import Emulator

DTYPES = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.int64: INT64,
    torch.int32: INT32,
    torch.int16: INT16,
    torch.uint8: UINT8,
}
DEVICE = device_of("cuda" if count_gpus() else "cpu")

if not DEVICE.is_gpu:
    emulate(Emulator())


def there(tensor: torch.Tensor) -> Tensor:
    """A copy of torch's numbers on the device, which lie as they do."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.detach().as_strided((count,), (1,), 0)
    bits = whole.view(torch.uint16) if tensor.dtype is torch.bfloat16 else whole
    made = upload(bits.numpy(), DEVICE, dtype=DTYPES[tensor.dtype])
    made.address += int(tensor.storage_offset()) * tensor.element_size()
    made.shape, made.strides = tuple(tensor.shape), tensor.stride()
    return made


def back(tensor: Tensor) -> torch.Tensor:
    """A copy of a device tensor in RAM, for torch."""
    bits = torch.from_numpy(tensor.bits())
    return bits.view(torch.bfloat16) if tensor.dtype is BFLOAT16 else bits


def by_torch(compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute`` on copies of torch's tensors, which it may change, and with such a result."""

    def run(*args: Any, **options: Any) -> Any:
        copies = dict[int, tuple[torch.Tensor, Tensor]]()

        def moved(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return DTYPES[value]
            if not isinstance(value, torch.Tensor):
                return value
            return copies.setdefault(id(value), (value, there(value)))[1]

        result = compute(*map(moved, args), **{key: moved(options[key]) for key in options})
        for tensor, copied in copies.values():
            tensor.copy_(back(copied))
            if copied is result:
                return tensor
        return back(result) if isinstance(result, Tensor) else result

    return run


def tiles_of(tensor: PackedTensor) -> TiledMatrix:
    """A packed matrix as the kernels take it."""
    shape = (tensor.shape[0], tensor.shape[1])
    factor = None
    if tensor.scale != 1.0:
        factor = upload(np.full(-(-shape[0] // 16), tensor.scale, np.float32), DEVICE)
    return TiledMatrix(tensor.format.name, shape, upload(tile(tensor), DEVICE), factor)


def cache_of(keys: torch.Tensor, values: torch.Tensor) -> BlockedCache:
    """A cache of one layer with these (heads, allocated, size) in it."""
    (heads, allocated, key), value = keys.shape, values.shape[2]
    cache = BlockedCache([(heads, key, value)], allocated, DTYPES[keys.dtype], DEVICE)
    cache.reserve(allocated)
    for number, parts in enumerate(cache.parts(0)):
        for part, given in zip(parts, (keys, values), strict=True):
            here = given[:, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            whole = torch.zeros(part.shape, dtype=given.dtype)
            whole[:, : here.shape[1]] = here
            part.put(there(whole))
    return cache


def kept(cache: BlockedCache, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Its first keys and values, (heads, length, size)."""
    keys, values = (
        torch.cat([back(part) for part in parts], 1) for parts in zip(*cache.parts(0), strict=True)
    )
    return keys[:, :length], values[:, :length]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers on the CPU, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
