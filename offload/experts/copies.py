"""Copies of experts from RAM to a GPU's slots, which run beside passes."""

from __future__ import annotations

import time
from collections import deque

from localrt.offload.experts.cache import Key
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.pool import Arrival, ExpertPool, GpuSlots

_COPY_SHARE = 4  # running copies lock at most a quarter of the slots in RAM


class ExpertCopies:
    """Copies to ``slots``, one after another, of ``seconds`` each.

    ``arriving`` are the experts being copied that are not yet in their tables.
    """

    def __init__(self, slots: GpuSlots, memory: ExpertMemory, seconds: float) -> None:
        self._slots, self._memory, self._seconds = slots, memory, seconds
        self.arriving: dict[Key, Arrival] = {}
        self._running = deque[Arrival]()  # in order; their experts are locked in RAM
        self._end = 0.0  # estimated

    def __len__(self) -> int:
        return len(self._running)

    def wait_s(self, now: float | None = None) -> float:
        """Estimated seconds until the link is idle."""
        return max(0.0, self._end - (time.perf_counter() if now is None else now))

    def bring(self, place: int, expert: int) -> Arrival:
        """Begin to copy an expert from RAM to the GPU."""
        pool = self._memory.pool(place)
        arrival = self._slots.bring((place, expert), pool.data(place, expert))
        pool.cache.lock(place, [expert])
        self._running.append(arrival)
        self.arriving[place, expert] = arrival
        self._end = max(self._end, time.perf_counter()) + self._seconds
        return arrival

    def settle(self, *, wait: bool = False) -> None:
        """Enter experts whose copies have ended, and unlock them in RAM.

        Waits for running copies only if they lock too many slots in RAM, or with ``wait``.
        """
        while self._running:
            arrival = self._running[0]
            (place, expert), copied = arrival.key, arrival.copied
            pool = self._memory.pool(place)
            if copied is not None and not copied.query():
                if not wait and len(self) <= copies_at_once(pool):
                    return
                copied.synchronize()
            self._running.popleft()
            pool.cache.unlock(place, [expert])
            if self.arriving.get(arrival.key) is arrival:
                self.enter(arrival)

    def enter(self, arrival: Arrival) -> None:
        """Put an expert into its table, once it has arrived or kernels wait for it."""
        del self.arriving[arrival.key]
        self._slots.enter(arrival)


def copies_at_once(pool: ExpertPool) -> int:
    """How many copies may run that read from the pool."""
    return pool.cache.capacity // _COPY_SHARE
