"""Torch's KV cache: per layer one contiguous (G, capacity, E) pair that grows in steps.

It knows lengths and tensors; which tokens they stand for is the session's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["TorchKVCache", "grown_capacity"]

_STEP = 256
_ROUND = 64  # divides _STEP


def grown_capacity(length: int) -> int:
    """Tokens allocated to hold ``length``: whole steps, so that growth is rare and waste small."""
    return -(-length // _STEP) * _STEP


class TorchKVCache:
    """See the ``KVCache`` protocol. ``shapes`` gives (kv heads, head size) per layer."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._capacity = capacity
        self._length = 0
        self._allocated = 0
        self._k = [torch.empty(g, 0, e, dtype=dtype, device=device) for g, e in shapes]
        self._v = [torch.empty_like(k) for k in self._k]

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
        return sum(t.nbytes for t in (*self._k, *self._v))

    def reserve(self, length: int) -> None:
        """Grow to at least ``length`` tokens: by a half, in whole steps, up to the capacity."""
        if length > self._capacity:
            raise ValueError(f"{length} tokens exceed the cache's capacity of {self._capacity}")
        if length <= self._allocated:
            return
        wanted = max(length, self._allocated + self._allocated // 2)
        size = min(grown_capacity(wanted), grown_capacity(self._capacity))
        for tensors in (self._k, self._v):
            for layer, old in enumerate(tensors):
                # Zeros, not garbage: a rounded view is multiplied by weights of zero.
                new = old.new_zeros(old.shape[0], size, old.shape[2])
                new[:, : self._length] = old[:, : self._length]
                tensors[layer] = new
        self._allocated = size

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put rows (n, G, E) behind the tokens held; ``advance`` makes them count."""
        start, stop = self._length, self._length + k.shape[0]
        self._k[layer][:, start:stop] = k.transpose(0, 1)
        self._v[layer][:, start:stop] = v.transpose(0, 1)

    def view(self, layer: int, extra: int, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values (G, length + extra, E), with ``extra`` rows just written.

        ``rounded`` goes on to a multiple of 64: what lies behind is finite and to be masked.
        """
        stop = self._length + extra
        if rounded:
            stop = -(-stop // _ROUND) * _ROUND
        return self._k[layer][:, :stop], self._v[layer][:, :stop]

    def advance(self, count: int) -> None:
        """Count written rows as held."""
        assert self._length + count <= self._allocated, "rows must be written before they count"
        self._length += count

    def trim(self, length: int) -> None:
        """Forget tokens from ``length`` on; memory stays for what comes next."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot trim a cache of {self._length} tokens to {length}")
        self._length = length
