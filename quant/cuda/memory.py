"""A device's memory in a few slabs: what ends is taken again by what is started later.

Work of a device runs in order, so nothing waits. It knows addresses, and not whose they are.
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
"""Bytes of a GPU that CUDA maps at once."""
_ALIGNMENT = 256


class Block:
    """``nbytes`` at an ``address`` of a device, until ``free`` or the last reference to it."""

    __slots__ = ("_back", "address", "nbytes")

    def __init__(self, address: int, nbytes: int, back: Callable[[int], None]) -> None:
        self.address, self.nbytes = address, nbytes
        self._back: Callable[[int], None] | None = back

    def free(self) -> None:
        """Give the memory back, even if views of it are left."""
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
    """Memory that ``alloc`` gives by its size and ``free`` takes back by its address.

    Pools whose ``alloc`` trims each other share a ``lock`` that a thread may take again.
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
        # A block may end in any thread, also while this one has the lock.
        self._ended: deque[int] = deque()
        self._lock = lock or RLock()
        # Once its last block has ended too, which refers to it.
        weakref.finalize(self, _free_all, self._slabs, free).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of the device."""
        return sum(self._slabs.values())

    @property
    def unused_nbytes(self) -> int:
        """Bytes of these that nobody has taken."""
        with self._lock:
            self._collect()
            return sum(size for _, size in self._gaps)

    def take(self, nbytes: int) -> Block:
        """Bytes that may hold anything; their address is a multiple of 256.

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
            return Block(at, nbytes, self._give_back)

    def trim(self) -> None:
        """Give back slabs that nobody uses."""
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
        """Make a gap, one with its neighbours in the slab."""
        place = bisect_left(self._gaps, (at, 0))
        if place < len(self._gaps) and self._gaps[place][0] == at + size not in self._slabs:
            size += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == at not in self._slabs:
            place -= 1
            at, before = self._gaps.pop(place)
            size += before
        self._gaps.insert(place, (at, size))
