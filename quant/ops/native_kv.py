"""The native KV cache in numpy: keys in tiles of 16, so that sixteen scores come at once.

Per layer, keys are (G, allocated / 16, E, 16) and values (G, allocated, E): bf16 as uint16, or int8
with one float32 scale for each token and head, (G, allocated).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.kv_growth import GrowingCache

__all__ = ["KVFormat", "NativeKVCache", "token_nbytes"]

KVFormat = Literal["bf16", "int8"]


@dataclass(frozen=True, slots=True)
class _Layer:
    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    k_scale: npt.NDArray[np.float32] | None
    v_scale: npt.NDArray[np.float32] | None

    @property
    def address(self) -> tuple[int, int, int | None, int | None]:
        """Where the four lie."""
        scales = (self.k_scale, self.v_scale)
        k_scale, v_scale = (None if s is None else s.ctypes.data for s in scales)
        return self.k.ctypes.data, self.v.ctypes.data, k_scale, v_scale

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        scales = (self.k_scale, self.v_scale)
        return [self.k, self.v, *(scale for scale in scales if scale is not None)]


def token_nbytes(shapes: Sequence[tuple[int, int]], kv_format: KVFormat) -> int:
    """Bytes that one token takes in all layers. ``shapes`` gives (kv heads, head size) of each."""
    if kv_format == "bf16":
        return sum(4 * groups * width for groups, width in shapes)
    return sum(2 * groups * (width + 4) for groups, width in shapes)


class NativeKVCache(GrowingCache):
    """See the ``KVCache`` protocol. ``shapes`` gives (kv heads, head size) per layer."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], capacity: int, kv_format: KVFormat = "bf16"
    ) -> None:
        super().__init__(capacity)
        self._kv_format = kv_format
        self._shapes = list(shapes)
        self.layers = [self._empty(groups, width, 0) for groups, width in shapes]
        self.addresses = [layer.address for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for layer in self.layers for array in layer.arrays)

    def _empty(self, groups: int, width: int, size: int) -> _Layer:
        # Zeros: a tile's unused lanes are multiplied before they are masked.
        dtype = np.uint16 if self._kv_format == "bf16" else np.int8
        k = np.zeros((groups, size // 16, width, 16), dtype)
        v = np.zeros((groups, size, width), dtype)
        if self._kv_format == "bf16":
            return _Layer(k, v, None, None)
        k_scale, v_scale = (np.zeros((groups, size), np.float32) for _ in range(2))
        return _Layer(k, v, k_scale, v_scale)

    def _grow(self, size: int) -> None:
        tiles = -(-self._length // 16)
        for index, (groups, width) in enumerate(self._shapes):
            old, new = self.layers[index], self._empty(groups, width, size)
            new.k[:, :tiles] = old.k[:, :tiles]
            for mine, theirs in zip(new.arrays[1:], old.arrays[1:], strict=True):
                mine[:, : self._length] = theirs[:, : self._length]
            self.layers[index] = new
            self.addresses[index] = new.address
