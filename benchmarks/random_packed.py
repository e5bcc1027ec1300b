"""Random packed weights of any size in seconds: random codes, scales for an expected spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from random_checkpoint import RandomCheckpoint

from localrt.models.checkpoints.base import TensorInfo
from localrt.quant.formats import F32, FORMATS, PackedTensor
from localrt.quant.formats.tiled import TiledTensor, tile_tensor

# Mean square of a code under each kind of format, for scales that keep a matrix's rows near 1.
_SPREAD = {"nf4": 0.3, "mxfp4": 2.7, "nvfp4": 2.7, "q6_k": 18.0, "q8_0": 74.0}


def random_packed(name: str, rows: int, columns: int, *, seed: int = 0) -> PackedTensor:
    """(rows, columns) whose products with unit inputs are near 1. No zeros, no NaN."""
    rng = np.random.default_rng([seed, rows, columns])
    format_ = FORMATS[name]
    data = rng.integers(0, 256, (rows, format_.row_bytes(columns)), dtype=np.uint8)
    blocks = data.reshape(rows, columns // format_.block, format_.block_bytes)
    spread = _SPREAD.get(name, 74.0 if name.startswith("int8") else 4.6)
    size = 1.0 / (spread * columns**0.5)
    scales = (size * rng.uniform(0.7, 1.4, blocks.shape[:2])).astype(np.float16)
    halves = scales[..., None].view(np.uint8)
    if name == "mxfp4":
        blocks[..., 0] = 127 + round(np.log2(size)) + rng.integers(-1, 2, blocks.shape[:2])
    elif name == "nvfp4":  # scales from 0.75 to 1.5, and a factor
        blocks[..., 0] = rng.integers(52, 61, blocks.shape[:2])
    elif name == "q6_k":
        blocks[..., 192:208] = rng.integers(1, 4, (*blocks.shape[:2], 16))
        blocks[..., 208:] = halves
    else:
        blocks[..., :2] = halves
        if name in ("q4_k", "q5_k"):  # six-bit scales and minima of about 32 each
            blocks[..., :2] = (scales / 32)[..., None].view(np.uint8)
            blocks[..., 2:4] = (scales / 4)[..., None].view(np.uint8)
        elif name in ("q4_1", "q5_1") or name.endswith("m"):
            middle = (1 << {"q4_1": 4, "q5_1": 5}.get(name, int(name[3:4] or 4))) / 2
            blocks[..., 2:4] = (-middle * scales).astype(np.float16)[..., None].view(np.uint8)
    return PackedTensor(name, format_, (rows, columns), data, size if name == "nvfp4" else 1.0)


class RandomPackedCheckpoint(RandomCheckpoint):
    """A ``RandomCheckpoint`` whose matrices are packed, and come in tiles as from a store."""

    def __init__(
        self, architecture: str, config: Mapping[str, Any], name: str, *, seed: int = 0
    ) -> None:
        super().__init__(architecture, config, seed=seed)
        self._name = name
        self.tensors = {
            key: info
            if len(info.shape) == 1
            else TensorInfo(key, info.shape, FORMATS[name], self._bytes(info.shape))
            for key, info in self.tensors.items()
        }

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return shape[0] * FORMATS[self._name].row_bytes(shape[1])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows of a tensor."""
        info = self.tensors[name]
        if info.format is F32:
            return super().read(name, start, stop)
        rows, columns = info.shape
        seed = sum(name.encode()) + self._seed
        whole = random_packed(self._name, rows, columns, seed=seed)
        return whole.take_rows(np.arange(rows)[start:stop])

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[PackedTensor | TiledTensor]:
        """The whole tensor at once."""
        whole = self.read(name)
        yield whole if len(whole.shape) == 1 else tile_tensor(whole)
