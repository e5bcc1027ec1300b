"""Pool allocator of device memory: a few slabs, whose freed blocks later work reuses.

A device works in order, so reuse needs no waits. The pool knows addresses, not their contents.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import RLock

_SLAB = 16 << 20
GRANULE = 2 << 20
"""The page size of CUDA's mappings of GPU memory."""
_ALIGNMENT = 256


class PoolBlock:
    """``nbytes`` at an ``address`` of a device, freed by ``free`` or with its last reference."""

    __slots__ = ("_back", "address", "nbytes")

    def __init__(self, address: int, nbytes: int, back: Callable[[int], None]) -> None:
        self.address, self.nbytes = address, nbytes
        self._back: Callable[[int], None] | None = back

    def free(self) -> None:
        """Free the memory, even if there are views of it."""
        back, self._back = self._back, None
        if back is not None:
            self.nbytes = 0
            back(self.address)

    def __del__(self) -> None:
        self.free()


def _free_all(slabs: dict[int, int], free: Callable[[int], None]) -> None:
    for address in slabs:
        free(address)


class Pool:
    """Blocks from slabs, which ``alloc`` (size) and ``free`` (address) get from the device.

    Pools whose ``alloc`` trims each other share a reentrant ``lock``.
    """

    def __init__(
        self,
        alloc: Callable[[int], int],
        free: Callable[[int], None],
        *,
        slab: int = _SLAB,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._alloc, self._free, self._slab = alloc, free, slab
        self._slabs: dict[int, int] = {}  # sizes by address
        self._gaps: list[tuple[int, int]] = []  # addresses and sizes, in order
        self._taken: dict[int, int] = {}
        # Any thread may free a block, even garbage collection while this thread holds the lock.
        self._ended: deque[int] = deque()
        self._lock = lock or RLock()
        # Runs after the last block is freed too, since blocks refer to their pool.
        weakref.finalize(self, _free_all, self._slabs, free).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(self._slabs.values())

    @property
    def unused_nbytes(self) -> int:
        """Bytes of the slabs that no block uses."""
        with self._lock:
            self._collect()
            return sum(size for _, size in self._gaps)

    def take(self, nbytes: int) -> PoolBlock:
        """A block of uninitialized memory; its address is a multiple of 256.

        Raises:
            MemoryBudgetError: ``alloc`` has none.
        """
        size = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        with self._lock:
            self._collect()
            fitting = [(gap[1], place) for place, gap in enumerate(self._gaps) if gap[1] >= size]
            if not fitting:
                self._add(size)
                return self.take(nbytes)
            room, place = min(fitting)
            at, _ = self._gaps[place]
            if room == size:
                del self._gaps[place]
            else:
                self._gaps[place] = at + size, room - size
            self._taken[at] = size
            return PoolBlock(at, nbytes, self._give_back)

    def trim(self) -> None:
        """Free the slabs without blocks."""
        with self._lock:
            self._collect()
            for at, size in list(self._gaps):
                if self._slabs.get(at) == size:
                    self._gaps.remove((at, size))
                    del self._slabs[at]
                    self._free(at)

    def _give_back(self, address: int) -> None:
        self._ended.append(address)

    def _add(self, size: int) -> None:
        slab = max(self._slab, -(-size // GRANULE) * GRANULE)
        try:
            at = self._alloc(slab)
        except MemoryError:
            slab = size
            at = self._alloc(slab)
        self._slabs[at] = slab
        self._put(at, slab)

    def _collect(self) -> None:
        while self._ended:
            at = self._ended.popleft()
            self._put(at, self._taken.pop(at))

    def _put(self, at: int, size: int) -> None:
        """Add a gap, merged with adjacent gaps of its slab."""
        place = bisect_left(self._gaps, (at, 0))
        if place < len(self._gaps) and self._gaps[place][0] == at + size not in self._slabs:
            size += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == at not in self._slabs:
            place -= 1
            at, before = self._gaps.pop(place)
            size += before
        self._gaps.insert(place, (at, size))
