"""What every KV cache counts: tokens held, room allocated, growth in steps, trimming.

Which arrays hold the keys and values, and how they are laid out, is an implementation's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["GrowingCache", "grown_capacity"]

_STEP = 256


def grown_capacity(length: int) -> int:
    """Tokens allocated to hold ``length``: whole steps, so that growth is rare and waste small."""
    return -(-length // _STEP) * _STEP


class GrowingCache(ABC):
    """The counting half of the ``KVCache`` protocol."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._length = 0
        self.allocated = 0

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def capacity(self) -> int:
        """The most tokens it may hold."""
        return self._capacity

    @abstractmethod
    def _grow(self, size: int) -> None:
        """Allocate room for ``size`` tokens, zeroed, and keep those held."""

    def reserve(self, length: int) -> None:
        """Grow to at least ``length`` tokens: by a half, in whole steps, up to the capacity."""
        if length > self._capacity:
            raise ValueError(f"{length} tokens exceed the cache's capacity of {self._capacity}")
        if length <= self.allocated:
            return
        wanted = max(length, self.allocated + self.allocated // 2)
        size = min(grown_capacity(wanted), grown_capacity(self._capacity))
        self._grow(size)
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
