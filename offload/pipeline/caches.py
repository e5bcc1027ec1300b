"""KV caches of a pipeline: each layer's is on the device that computes its attention.

With layers on a GPU, a sequence's keys and values are on two devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from weakref import WeakSet

import numpy as np

from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.adapters import Mix
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.kv import BlockCache, KVCache, ReadBlocks, held_blocks, read_pieces
from localrt.quant.ops.protocol import Batch, LayerSpec, Ops
from localrt.quant.ops.states import SavedState, StateLayout


class SplitCache:
    """See ``KVCache``. ``memories`` describes each layer; ``on_gpu`` names the layers whose cache
    is on the GPU.
    """

    def __init__(
        self,
        host: Ops,
        gpu: Ops,
        memories: Sequence[Sequence[LayerSpec]],
        on_gpu: frozenset[int],
        capacity: int,
    ) -> None:
        self._host_ops, self._on_gpu = host, on_gpu
        self._host_specs = _specs(memories, range(len(memories)), without=on_gpu)
        self._gpu_ops = gpu
        self._gpu_specs = _specs(memories, sorted(on_gpu))
        self._caches: dict[int, KVCache] = {
            id(host): host.kv_cache(self._host_specs, capacity),
            id(gpu): gpu.kv_cache(self._gpu_specs, capacity),
        }

    def on(self, ops: Ops) -> KVCache:
        """The cache of the device of ``ops``."""
        return self._caches[id(ops)]

    def part(self, layer: int) -> tuple[KVCache, int]:
        """A layer's cache, and its place in it, where all layers attend."""
        there = layer in self._on_gpu
        place = sum((other in self._on_gpu) is there for other in range(layer))
        return self.on(self._gpu_ops if there else self._host_ops), place

    @property
    def length(self) -> int:
        return self.on(self._host_ops).length

    @property
    def capacity(self) -> int:
        return self.on(self._host_ops).capacity

    @property
    def nbytes(self) -> int:
        """Bytes in RAM."""
        return self.on(self._host_ops).nbytes

    @property
    def gpu_nbytes(self) -> int:
        """Bytes on the GPU."""
        return self.on(self._gpu_ops).nbytes

    @property
    def mix(self) -> Mix:
        return next(iter(self._caches.values())).mix

    @mix.setter
    def mix(self, mix: Mix) -> None:
        for cache in self._caches.values():
            cache.mix = mix

    def reserve(self, length: int) -> None:
        """Make room on both devices."""
        for cache in self._caches.values():
            cache.reserve(length)

    def advance(self, count: int) -> None:
        """Count written rows as tokens, on both devices."""
        for cache in self._caches.values():
            cache.advance(count)

    def trim(self, length: int) -> int:
        """Trim both devices' caches to the tokens that both can still hold."""
        while any(cache.length > length for cache in self._caches.values()):
            for cache in self._caches.values():
                length = cache.trim(min(length, cache.length))
        return length

    @property
    def kv_layout(self) -> str:
        """See ``BlockCache``; empty if either device's cache cannot be saved."""
        layouts = [cache.kv_layout for cache in self._block_caches()]
        whole = len(layouts) == len(self._caches) and all(layouts)
        return " and ".join(layouts) if whole else ""

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 tokens, both devices together."""
        return sum(cache.block_bytes for cache in self._block_caches())

    def take_blocks(self, first: int, count: int) -> Bytes:
        """Each block's bytes: the host's, then the GPU's."""
        return np.concatenate([p.take_blocks(first, count) for p in self._block_caches()], axis=1)

    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        for start, blocks in read_pieces(first, count, self.block_bytes, read):
            at = 0
            for cache in self._block_caches():
                columns = blocks[:, at : at + cache.block_bytes]
                cache.fill_blocks(start, len(blocks), held_blocks(columns, start))
                at += cache.block_bytes

    def saved_states(self) -> list[SavedState]:
        """See ``BlockCache``: joins the states of both devices after the same number of tokens."""
        saved = [cache.saved_states() for cache in self._block_caches()]
        if not any(saved):
            return []
        host, gpu = ({state.length: state for state in states} for states in saved)
        if not host or not gpu:
            return list((host or gpu).values())
        return [
            SavedState(host[n].position, n, np.concatenate([host[n].data, gpu[n].data]))
            for n in sorted(host.keys() & gpu.keys())
            if host[n].position == gpu[n].position
        ]

    def restore(self, length: int, states: Sequence[SavedState]) -> int:
        caches = self._block_caches()
        for cache in caches:
            shares = [self._share(state, cache) for state in states]
            length = cache.restore(length, shares)
        return self.trim(length)

    def _share(self, state: SavedState, cache: BlockCache) -> SavedState:
        """One device's share of a state."""
        sizes = [
            StateLayout(split_layers(specs)[1]).saved_nbytes(state.position, state.length)
            for specs in (self._host_specs, self._gpu_specs)
        ]
        cut = sizes[0] if split_layers(self._host_specs)[1] else 0
        on_host = cache is self.on(self._host_ops)
        return replace(state, data=state.data[:cut] if on_host else state.data[cut:])

    def _block_caches(self) -> list[BlockCache]:
        return [cache for cache in self._caches.values() if isinstance(cache, BlockCache)]

    def select(self, first: int, rows: Sequence[int]) -> None:
        """Keep selected rows on both devices."""
        for cache in self._caches.values():
            cache.select(first, rows)


class Caches:
    """All caches in use; ``memories`` and ``on_gpu`` are as for ``SplitCache``. ``gpu`` may be None
    if no layer's cache is on one.
    """

    def __init__(
        self,
        memories: Sequence[Sequence[LayerSpec]],
        host: Ops,
        gpu: Ops | None,
        on_gpu: frozenset[int],
    ) -> None:
        self._memories, self._on_gpu = memories, on_gpu
        self._host, self._gpu = host, gpu if on_gpu else None
        self._host_specs = _specs(memories, range(len(memories)), without=on_gpu)
        self._gpu_specs = _specs(memories, sorted(on_gpu))
        self._live: WeakSet[KVCache] = WeakSet()

    def make(self, capacity: int) -> KVCache:
        """An empty cache for one sequence."""
        cache: KVCache
        if self._gpu is None:
            cache = self._host.kv_cache(self._host_specs, capacity)
        else:
            cache = SplitCache(self._host, self._gpu, self._memories, self._on_gpu, capacity)
        self._live.add(cache)
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that all caches take now."""
        return sum(cache.nbytes for cache in self._live)

    @property
    def gpu_nbytes(self) -> int:
        """Bytes of GPU memory that all caches take now."""
        return sum(cache.gpu_nbytes for cache in self._live if isinstance(cache, SplitCache))

    @property
    def gpu_step(self) -> int:
        """The approximate bytes of GPU memory by which a sequence's cache grows at a time."""
        return 0 if self._gpu is None else self._gpu.kv_nbytes(self._gpu_specs, 1)

    def gpu_growth(self, batch: Batch) -> int:
        """The most bytes of GPU memory that a pass may add."""
        return 0 if self._gpu is None else _growth(batch, self._gpu, self._gpu_specs)

    def growth(self, batch: Batch) -> int:
        """The most bytes of RAM that a pass may add."""
        return _growth(batch, self._host, self._host_specs)


def _specs(
    memories: Sequence[Sequence[LayerSpec]],
    layers: Iterable[int],
    without: frozenset[int] = frozenset(),
) -> list[LayerSpec]:
    """The cache specs of some layers, in order."""
    return [spec for layer in layers if layer not in without for spec in memories[layer]]


def _growth(batch: Batch, ops: Ops, specs: Sequence[LayerSpec]) -> int:
    """The most bytes that a pass may add to the caches of ``ops``, which keep ``specs``."""
    grown = 0
    for span in split_batch(batch, ops).spans:
        cache, length = span.cache, span.cache.length + span.rows
        needed = ops.kv_nbytes(specs, length)
        if needed > cache.nbytes and not getattr(cache, "grows_in_place", False):
            needed = ops.kv_nbytes(specs, min(cache.capacity, length * 3 // 2))
        grown += max(0, needed - cache.nbytes)
    return grown


def split_batch(batch: Batch, ops: Ops) -> Batch:
    """The batch with the caches that ``ops`` computes on."""
    if not any(isinstance(span.cache, SplitCache) for span in batch.spans):
        return batch
    spans = tuple(
        replace(span, cache=span.cache.on(ops)) if isinstance(span.cache, SplitCache) else span
        for span in batch.spans
    )
    return replace(batch, spans=spans)
