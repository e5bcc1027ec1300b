"""How long a conversation that waits keeps its KV cache in memory.

Who waits for a tool comes back after about as long as that tool took before; who waits for a
person, as long as that person took. Memory is held as long as that costs less than bringing the
cache back (Continuum, Li et al. 2025); then the cache goes down a tier: from a card to RAM, from
RAM to the disk. Where memory is short, those who are expected back last go first. It does not know
what a cache holds.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol, TypeAlias

__all__ = ["PERSON", "KvKeeper", "Parkable", "Tier", "hold_seconds"]

PERSON = ""
"""The name under which a person's own pauses are kept."""

_MOST_SECONDS = 600.0  # held for nobody else's sake: then it is the system's turn
_SAMPLES = 32  # durations that are remembered of each tool
_RESTORE_BYTES_S = 1e9  # of reading a cache back, until one was read
_LEAST_RESTORE_S = 0.01


Tier: TypeAlias = Literal["ram", "disk"]


class Parkable(Protocol):
    """A conversation whose cache can be moved to the disk."""

    @property
    def kv_nbytes(self) -> int:
        """Bytes that its cache takes in memory now."""

    def try_park(self, to: Tier) -> bool:
        """Move the cache there if that is possible now; whether it was. Never raises."""


def hold_seconds(
    durations: Sequence[float], *, restore_s: float, price: float, most: float = _MOST_SECONDS
) -> float:
    """The time to hold a cache whose owner was away for ``durations`` before.

    Holding for T costs ``price`` (seconds lost by others per second held) until the owner is back
    or T is over; not having it costs ``restore_s``. The best T is 0 or one of the durations, at
    most ``most``. Without any durations the cache is held for as long as holding is cheaper than
    restoring it once.
    """
    if price <= 0:
        return most
    if not durations:
        return min(most, restore_s / price)
    best, least = 0.0, restore_s
    for held in sorted(set(durations)):
        if held > most:
            break
        away = fmean(min(d, held) for d in durations)
        late = fmean(d > held for d in durations)
        cost = away * price + late * restore_s
        if cost < least:
            best, least = held, cost
    return best


@dataclass(slots=True)
class _Wait:
    since: float
    tool: str
    until: float
    tier: int = 0  # where it goes next


class KvKeeper:
    """The conversations of one model that wait. Thread-safe.

    ``room`` says how many bytes are left for caches, ``price`` what one of so many bytes costs the
    others, in seconds per second. ``tiers`` are where caches go, one after another. A thread runs
    while something waits.
    """

    def __init__(
        self,
        *,
        room: Callable[[], int],
        price: Callable[[int], float],
        tiers: Sequence[Tier] = ("disk",),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._price = price
        self._tiers = tiers
        self._clock = clock
        self._lock = threading.Condition()
        self._waits: weakref.WeakKeyDictionary[Parkable, _Wait] = weakref.WeakKeyDictionary()
        self._durations: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_SAMPLES)
        )
        self._restore_bytes_s = _RESTORE_BYTES_S
        self._thread: threading.Thread | None = None
        self._closed = False

    def waits(self, chat: Parkable, tool: str = PERSON) -> None:
        """``chat`` has answered and waits for ``tool``."""
        nbytes = chat.kv_nbytes
        restore = max(_LEAST_RESTORE_S, nbytes / self._restore_bytes_s)
        with self._lock:
            if self._closed or not nbytes:
                return
            now = self._clock()
            held = hold_seconds(self._durations[tool], restore_s=restore, price=self._price(nbytes))
            self._waits[chat] = _Wait(now, tool, now + held)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="localrt-kv-keeper", daemon=True
                )
                self._thread.start()
            self._lock.notify()
        self.make_room()

    def returns(self, chat: Parkable) -> None:
        """``chat`` goes on."""
        with self._lock:
            wait = self._waits.pop(chat, None)
            if wait is not None:
                self._durations[wait.tool].append(self._clock() - wait.since)

    def restored(self, nbytes: int, seconds: float) -> None:
        """A cache was brought back from the disk in so long."""
        if nbytes and seconds > 0:
            self._restore_bytes_s = nbytes / seconds

    def make_room(self) -> int:
        """Where there is no room left, park those expected last; the bytes freed."""
        with self._lock:
            waiting = dict(self._waits)
            now = self._clock()
            order = sorted(waiting, key=lambda chat: -self._expected(waiting[chat], now))
        freed, missing = 0, 1 - self._room()
        for chat in order:
            if freed >= missing:
                break
            freed += self._park(chat)
        return freed

    def close(self) -> None:
        """Let go of all; nothing is parked."""
        with self._lock:
            self._closed = True
            self._waits.clear()
            self._lock.notify()

    # -- parts -----------------------------------------------------------------------------------

    def _expected(self, wait: _Wait, now: float) -> float:
        """Seconds until the owner is expected back: the mean of the durations that are left."""
        gone = now - wait.since
        left = [d - gone for d in self._durations[wait.tool] if d > gone]
        return fmean(left) if left else gone

    def _park(self, chat: Parkable) -> int:
        nbytes = chat.kv_nbytes
        with self._lock:
            wait = self._waits.get(chat)
            tier = self._tiers[wait.tier if wait is not None else 0]
        parked = chat.try_park(tier)
        with self._lock:
            wait = self._waits.get(chat)
            if wait is not None:  # it still waits: for how long is of interest in any case
                further = parked and wait.tier + 1 < len(self._tiers)
                wait.tier += further
                wait.until = self._clock() + _MOST_SECONDS if further else float("inf")
        return nbytes if parked else 0

    def _run(self) -> None:
        while True:
            with self._lock:
                # Looked up once: who is dropped meanwhile is out of the dictionary.
                ends = [w.until for w in self._waits.values() if w.until < float("inf")]
                if self._closed or not ends:
                    self._thread = None
                    return
                now = self._clock()
                due = [chat for chat, wait in self._waits.items() if wait.until <= now]
                if not due:
                    self._lock.wait(max(0.0, min(ends) - now))
                    continue
            for chat in due:
                self._park(chat)
                del chat
            del due  # the thread keeps nobody alive
