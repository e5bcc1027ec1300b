"""The native KV cache: bf16 in numpy, keys in tiles of 16 so that sixteen scores come at once.

Per layer, keys are (G, allocated / 16, E, 16) and values (G, allocated, E), as uint16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["NativeKVCache", "grown_capacity"]

_STEP = 256

Bits = npt.NDArray[np.uint16]


def grown_capacity(length: int) -> int:
    """Tokens allocated to hold ``length``: whole steps."""
    return -(-length // _STEP) * _STEP


class NativeKVCache:
    """See the ``KVCache`` protocol. ``shapes`` gives (kv heads, head size) per layer."""

    def __init__(self, shapes: Sequence[tuple[int, int]], capacity: int) -> None:
        self._shapes = list(shapes)
        self._capacity = capacity
        self._length = 0
        self.allocated = 0
        self.k: list[Bits] = [np.empty((g, 0, e, 16), np.uint16) for g, e in shapes]
        self.v: list[Bits] = [np.empty((g, 0, e), np.uint16) for g, e in shapes]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def capacity(self) -> int:
        """The most tokens it may hold."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in (*self.k, *self.v))

    def reserve(self, length: int) -> None:
        """Grow to at least ``length`` tokens: by a half, in whole steps, up to the capacity."""
        if length > self._capacity:
            raise ValueError(f"{length} tokens exceed the cache's capacity of {self._capacity}")
        if length <= self.allocated:
            return
        wanted = max(length, self.allocated + self.allocated // 2)
        size = min(grown_capacity(wanted), grown_capacity(self._capacity))
        tiles = -(-self._length // 16)
        for layer, (groups, width) in enumerate(self._shapes):
            # Zeros: a tile's unused lanes are multiplied before they are masked.
            k = np.zeros((groups, size // 16, width, 16), np.uint16)
            v = np.zeros((groups, size, width), np.uint16)
            k[:, :tiles] = self.k[layer][:, :tiles]
            v[:, : self._length] = self.v[layer][:, : self._length]
            self.k[layer], self.v[layer] = k, v
        self.allocated = size

    def advance(self, count: int) -> None:
        """Count written rows as held."""
        assert self._length + count <= self.allocated, "rows must be written before they count"
        self._length += count

    def trim(self, length: int) -> None:
        """Forget tokens from ``length`` on; memory stays for what comes next."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot trim a cache of {self._length} tokens to {length}")
        self._length = length
