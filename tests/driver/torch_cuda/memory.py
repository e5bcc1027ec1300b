"""torch's memory: of GPUs, and pinned RAM.

It is kept for reuse as torch does, at once in its own stream; what is freed is overwritten.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.driver.torch_cuda.streams import (
    Event,
    Stream,
    call,
    current_stream,
    index_of,
    relaxed,
    using,
)

_POISON = 0xA7
_OUT_OF_MEMORY = 2


def bytes_at(address: int, nbytes: int) -> tuple[Tensor, Any]:
    """Memory as a tensor of the CPU, and what lives as long as that."""
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(buffer)), buffer


@dataclass(eq=False)
class Block:
    """A piece of memory. Once freed, those who allocate in ``home`` may have it."""

    address: int
    nbytes: int
    home: object  # a stream, or a graph's pool
    stream: Stream | None = None  # that it was allocated in
    streams: set[Stream] = field(default_factory=set)  # of pinned RAM: those that copy
    free: bool = False


class GpuMemory:
    """A GPU's memory. Tensors end at any time: what they free is dealt with by the next call."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pools: dict[Stream, object] = {}  # of streams that are recorded
        self._graphs: dict[object, int] = {}  # of each pool; 0: it has ended
        self.blocks: dict[int, Block] = {}
        self._kept: dict[tuple[object, int], list[Block]] = defaultdict(list)
        self._ended: deque[Block] = deque()
        self._lock = threading.RLock()

    def tensor(self, nbytes: int) -> Tensor:
        """New bytes, as a tensor of the CPU."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            self.drain()
            block = self._take(-(-nbytes // 512) * 512)
        whole, buffer = bytes_at(block.address, nbytes)
        weakref.finalize(buffer, self.end, block)
        return whole

    def end(self, block: Block) -> None:
        """Nothing refers to it."""
        if not block.free:
            block.free = True
            self._ended.append(block)

    def drain(self) -> None:
        """Keep what has ended for others."""
        with self._lock, using(self.index):
            while self._ended:
                block = self._ended.popleft()
                where = block.stream
                assert where is not None
                if block.home == where or where in self.pools:  # else replays may be writing it
                    call("cuMemsetD8Async", block.address, _POISON, block.nbytes, where.cuda_stream)
                self._kept[block.home, block.nbytes].append(block)

    def _take(self, nbytes: int) -> Block:
        where = current_stream(self.index)
        home = self.pools.get(where, where)
        kept = self._kept[home, nbytes]
        if kept:
            block = kept.pop()
        else:
            block = Block(self._alloc(nbytes), nbytes, home)
            self.blocks[block.address] = block
        block.stream, block.free = where, False
        return block

    def _alloc(self, nbytes: int) -> int:
        with using(self.index), relaxed():
            found = call("cuMemAlloc", nbytes, may=(_OUT_OF_MEMORY,))
            if found == _OUT_OF_MEMORY and not self.pools:
                self.empty_cache()
                found = call("cuMemAlloc", nbytes, may=(_OUT_OF_MEMORY,))
            if found == _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {nbytes} bytes")
            return int(found)

    def begin_graph(self, pool: object) -> None:
        """One more graph takes memory of ``pool``."""
        if self._graphs.get(pool) == 0:
            raise RuntimeError("the pool has ended with its last graph")
        self._graphs[pool] = self._graphs.get(pool, 0) + 1

    def end_graph(self, pool: object) -> None:
        """One graph less does."""
        self._graphs[pool] -= 1

    def empty_cache(self) -> None:
        """See ``torch.cuda.empty_cache``."""
        self.drain()
        with self._lock, using(self.index):
            for key in list(self._kept):
                if not self._graphs.get(key[0]):  # a stream, or it has ended
                    for block in self._kept.pop(key):
                        call("cuMemFree", block.address)
                        del self.blocks[block.address]

    def give_back(self) -> None:
        """Free all."""
        with using(self.index):
            for address in self.blocks:
                call("cuMemFree", address)

    def allocated(self) -> int:
        """Bytes of tensors."""
        self.drain()
        return sum(block.nbytes for block in self.blocks.values() if not block.free)


memories: dict[int, GpuMemory] = {}


def gpu_memory(device: Any = None) -> GpuMemory:
    """The memory of a GPU."""
    return memories.setdefault(index_of(device), GpuMemory(index_of(device)))


class HostMemory:
    """Pinned RAM, which is used again once the copies from and to it have ended."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._ended: deque[Block] = deque()
        self._waiting: list[tuple[Block, list[Event]]] = []
        self._lock = threading.Lock()

    def tensor(self, nbytes: int) -> Tensor:
        """New bytes."""
        size = 1 << max(9, (nbytes - 1).bit_length())
        with self._lock, using(index_of()), relaxed():
            self._drain()
            block = next((b for b in self._blocks.values() if b.free and b.nbytes == size), None)
            if block is None:
                block = Block(int(call("cuMemHostAlloc", size, 0)), size, None)
                self._blocks[block.address] = block
            block.free, block.streams = False, set()
        whole, buffer = bytes_at(block.address, nbytes)
        weakref.finalize(buffer, self._ended.append, block)
        return whole

    def use(self, tensor: Tensor, stream: Stream) -> None:
        """A copy has begun."""
        with self._lock:
            if block := self._blocks.get(tensor.untyped_storage().data_ptr()):
                block.streams.add(stream)

    def give_back(self) -> None:
        """Free all: nothing uses it any more."""
        with using(0):
            for address in self._blocks:
                call("cuMemFreeHost", address)
        self._blocks.clear()
        self._ended.clear()
        self._waiting.clear()

    def _drain(self) -> None:
        while self._ended:
            block = self._ended.popleft()
            events = [Event() for _ in block.streams]
            for event, user in zip(events, block.streams, strict=True):
                event.record(user)
            self._waiting.append((block, events))
        for block, events in list(self._waiting):
            if all(event.query() for event in events):
                self._waiting.remove((block, events))
                block.free = True
                ctypes.memset(block.address, _POISON, block.nbytes)


host_memory = HostMemory()
