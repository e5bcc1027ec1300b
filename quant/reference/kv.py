"""Torch's KV cache: per layer one contiguous (G, capacity, E) pair that grows in steps.

It knows lengths and tensors; which tokens they stand for is the session's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.ops.kv import GrowingCache, KVCache, ReadBlocks, TokenRows, read_pieces
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.ops.states import StateCache

_ROUND = 64  # divides the growth step


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
        self._dtype, self._device = dtype, device
        self._k = [torch.empty(g, 0, e, dtype=dtype, device=device) for g, e, _ in shapes]
        self._v = [torch.empty(g, 0, e, dtype=dtype, device=device) for g, _, e in shapes]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._k, *self._v))

    @property
    def kv_layout(self) -> str:
        alike = groupby((k.shape[0], k.shape[2], v.shape[2]) for k, v in self._layers())
        shapes = "+".join(f"{len(list(group))}x{g}x{e}x{d}" for (g, e, d), group in alike)
        return f"torch 1 {self._dtype} {shapes}".replace("torch.", "")

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 tokens in all layers."""
        return sum(
            BLOCK_TOKENS * t.shape[0] * t.shape[2] * t.element_size() for t in self._tensors()
        )

    @torch.inference_mode()
    def take_blocks(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """A copy in RAM, (count, block_bytes): per block, keys and values layer by layer."""
        parts = [
            tensor[:, first * BLOCK_TOKENS : (first + count) * BLOCK_TOKENS]
            .reshape(tensor.shape[0], count, BLOCK_TOKENS, -1)
            .transpose(0, 1)
            .reshape(count, -1)
            .view(torch.uint8)
            for tensor in self._tensors()
        ]
        return torch.cat(parts, dim=1).cpu().numpy()

    @torch.inference_mode()
    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        for start, blocks in read_pieces(first, count, self.block_bytes, read):
            self._put(start, blocks)

    def _put(self, first: int, blocks: npt.NDArray[np.uint8]) -> None:
        count, at = len(blocks), 0
        data = torch.from_numpy(blocks).to(self._device)
        for tensor in self._tensors():
            size = BLOCK_TOKENS * tensor.shape[0] * tensor.shape[2] * tensor.element_size()
            part = data[:, at : at + size].contiguous().view(tensor.dtype)
            part = part.view(count, tensor.shape[0], BLOCK_TOKENS, -1).transpose(0, 1)
            rows = slice(first * BLOCK_TOKENS, (first + count) * BLOCK_TOKENS)
            tensor[:, rows] = part.flatten(1, 2)
            at += size

    def _layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._k, self._v, strict=True)

    def _tensors(self) -> list[Tensor]:
        """The non-empty tensors: some layers read another's."""
        return [tensor for layer in self._layers() for tensor in layer if len(tensor)]

    def _grow(self, size: int) -> None:
        for tensors in (self._k, self._v):
            for layer, old in enumerate(tensors):
                # Zeros, not garbage: a rounded view is multiplied by weights of zero.
                new = old.new_zeros(old.shape[0], size, old.shape[2])
                new[:, : self._length] = old[:, : self._length]
                tensors[layer] = new

    def _move(self, first: int, rows: Sequence[int]) -> None:
        with torch.inference_mode():
            index = torch.tensor(rows, device=self._device) + first
            for tensor in (*self._k, *self._v):
                tensor[:, first : first + len(rows)] = tensor[:, index]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write rows (n, G, E) after the held tokens; ``advance`` makes them count."""
        start, stop = self._length, self._length + k.shape[0]
        self._k[layer][:, start:stop] = k.transpose(0, 1)
        self._v[layer][:, start:stop] = v.transpose(0, 1)

    def layer_done(self, layer: int, rows: int) -> None:
        """Nothing to do."""

    def token_rows(self, layer: int, width: int) -> TokenRows:
        """A layer's rows of ``width``, whose keys are values: on a CPU."""
        rows = self._k[layer][0]
        rows = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
        return TokenRows(rows.numpy().reshape(-1, BLOCK_TOKENS, width))

    def view(self, layer: int, extra: int, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values (G, length + extra, E), with ``extra`` rows just written.

        ``rounded`` extends to a multiple of 64: the extra rows are finite and must be masked.
        """
        stop = self._length + extra
        if rounded:
            stop = -(-stop // _ROUND) * _ROUND
        return self._k[layer][:, :stop], self._v[layer][:, :stop]


def with_states(kv: GrowingCache, states: Sequence[RecurrentSpec], device: torch.device) -> KVCache:
    """The empty cache ``kv`` of the layers that attend, with ``states`` of the others, if any."""

    def zeros(count: int) -> Tensor:
        with torch.inference_mode(False):  # they are changed between passes too
            return torch.zeros(count, dtype=torch.float32, device=device)

    return HybridCache(kv, StateCache(states, kv.capacity, zeros)) if states else kv
