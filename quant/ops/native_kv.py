"""The native KV cache: bf16 in numpy, keys in tiles of 16 so that sixteen scores come at once.

Per layer, keys are (G, allocated / 16, E, 16) and values (G, allocated, E), as uint16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.kv_growth import GrowingCache

__all__ = ["NativeKVCache"]

Bits = npt.NDArray[np.uint16]


class NativeKVCache(GrowingCache):
    """See the ``KVCache`` protocol. ``shapes`` gives (kv heads, head size) per layer."""

    def __init__(self, shapes: Sequence[tuple[int, int]], capacity: int) -> None:
        super().__init__(capacity)
        self._shapes = list(shapes)
        self.k: list[Bits] = [np.empty((g, 0, e, 16), np.uint16) for g, e in shapes]
        self.v: list[Bits] = [np.empty((g, 0, e), np.uint16) for g, e in shapes]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in (*self.k, *self.v))

    def _grow(self, size: int) -> None:
        tiles = -(-self._length // 16)
        for layer, (groups, width) in enumerate(self._shapes):
            # Zeros: a tile's unused lanes are multiplied before they are masked.
            k = np.zeros((groups, size // 16, width, 16), np.uint16)
            v = np.zeros((groups, size, width), np.uint16)
            k[:, :tiles] = self.k[layer][:, :tiles]
            v[:, : self._length] = self.v[layer][:, : self._length]
            self.k[layer], self.v[layer] = k, v
