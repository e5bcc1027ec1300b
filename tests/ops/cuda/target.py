"""Where the GPU's kernels are tested: on a CUDA GPU, else on the CPU."""

from __future__ import annotations

import torch

from localrt.quant.cuda.launch import emulate
from localrt.quant.cuda.products import TiledMatrix
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.tiled import tile
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


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers on the CPU, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
