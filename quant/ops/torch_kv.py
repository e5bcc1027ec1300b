"""Torch's KV cache: per layer one contiguous (G, capacity, E) pair that grows in steps.

It knows lengths and tensors; which tokens they stand for is the session's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localrt.quant.ops.kv_growth import GrowingCache

__all__ = ["TorchKVCache"]

_ROUND = 64  # divides a step of growth


class TorchKVCache(GrowingCache):
    """See the ``KVCache`` protocol. ``shapes`` gives (kv heads, key size, value size) per layer."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(capacity)
        self._k = [torch.empty(g, 0, e, dtype=dtype, device=device) for g, e, _ in shapes]
        self._v = [torch.empty(g, 0, e, dtype=dtype, device=device) for g, _, e in shapes]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for t in (*self._k, *self._v))

    def _grow(self, size: int) -> None:
        for tensors in (self._k, self._v):
            for layer, old in enumerate(tensors):
                # Zeros, not garbage: a rounded view is multiplied by weights of zero.
                new = old.new_zeros(old.shape[0], size, old.shape[2])
                new[:, : self._length] = old[:, : self._length]
                tensors[layer] = new

    def _move(self, first: int, rows: Sequence[int]) -> None:
        with torch.inference_mode():
            index = torch.tensor(rows, device=self._k[0].device) + first
            for tensor in (*self._k, *self._v):
                tensor[:, first : first + len(rows)] = tensor[:, index]

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
