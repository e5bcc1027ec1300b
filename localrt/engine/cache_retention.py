"""Prefix cache retention: how long the KV cache of a waiting conversation stays in memory.

A cache is held as long as that costs others less than reading it back would (Continuum, Li et al.
2025), and not at all for a tool that usually takes longer. Then it moves down a tier. If memory is
short, the conversation that has waited longest moves first.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localrt.engine.saved_caches import Tier

PERSON = ""
"""The name under which a person's own pauses are kept."""
_MOST_S = 600.0  # the longest time to hold a cache in a tier
_BLEND = 0.25  # weight of a new pause in a tool's running mean
_RESTORE_BYTES_S = 1e9  # speed of reading a cache back, until one was measured


class Parkable(Protocol):
    """A conversation whose cache can be saved and freed."""

    @property
    def kv_nbytes(self) -> int:
        """The bytes that its cache takes in memory now."""

    def try_park(self, to: Tier) -> bool:
        """Save its cache to a tier and free it, unless it is in use; return whether it did."""


@dataclass(slots=True)
class _Wait:
    tool: str
    since: float
    until: float
    tier: int = 0  # the index of the tier to move it to next


class KvKeeper:
    """The waiting conversations of one model. Thread-safe.

    ``room`` returns the bytes left for caches, ``price`` what holding a number of bytes costs other
    answers, in seconds per second. ``tiers`` are where caches go, in order. A thread runs while a
    conversation waits.
    """

    def __init__(
        self,
        *,
        room: Callable[[], int],
        price: Callable[[int], float],
        tiers: Sequence[Tier] = ("disk",),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room, self._price, self._tiers, self._clock = room, price, tiers, clock
        self._changed = threading.Condition()
        # In the order in which they began to wait.
        self._waits: weakref.WeakKeyDictionary[Parkable, _Wait] = weakref.WeakKeyDictionary()
        self._pauses: dict[str, float] = {}  # mean seconds by tool
        self._restore_bytes_s = _RESTORE_BYTES_S
        self._thread: threading.Thread | None = None
        self._closed = False

    def hold_s(self, tool: str, nbytes: int) -> float:
        """Return how long to hold ``nbytes`` for ``tool``: until that costs as much as reading them
        back, and not at all if its pauses are usually longer.
        """
        if (price := self._price(nbytes)) <= 0:
            return _MOST_S
        pays_s = min(_MOST_S, nbytes / self._restore_bytes_s / price)
        return pays_s if self._pauses.get(tool, 0.0) <= pays_s else 0.0

    def waits(self, chat: Parkable, tool: str = PERSON) -> None:
        """``chat`` has answered and waits for ``tool``."""
        nbytes = chat.kv_nbytes
        with self._changed:
            if self._closed or not nbytes:
                return
            now = self._clock()
            self._waits[chat] = _Wait(tool, now, now + self.hold_s(tool, nbytes))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="localrt-kv-keeper", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        self.make_room()

    def returns(self, chat: Parkable) -> None:
        """``chat`` continues: record how long it waited."""
        with self._changed:
            if (wait := self._waits.pop(chat, None)) is not None:
                pause = self._clock() - wait.since
                mean = self._pauses.get(wait.tool, pause)
                self._pauses[wait.tool] = mean + _BLEND * (pause - mean)

    def restored(self, nbytes: int, seconds: float) -> None:
        """Restoring a cache of ``nbytes`` from the disk took ``seconds``."""
        if nbytes and seconds > 0:
            self._restore_bytes_s = nbytes / seconds

    def make_room(self, nbytes: int = 1) -> int:
        """Save the caches that have waited longest until ``nbytes`` fit; return the bytes freed."""
        with self._changed:
            waiting = list(self._waits)
        freed, missing = 0, nbytes - self._room()
        for chat in waiting:
            if freed >= missing:
                break
            freed += self._park(chat)
        return freed

    def close(self) -> None:
        """Forget all waiting conversations; nothing is saved."""
        with self._changed:
            self._closed = True
            self._waits.clear()
            self._changed.notify()

    def _park(self, chat: Parkable) -> int:
        with self._changed:
            wait = self._waits.get(chat)
        if wait is None:  # it has continued
            return 0
        nbytes, parked = chat.kv_nbytes, chat.try_park(self._tiers[wait.tier])
        with self._changed:  # it still waits for what it waited, so its pause is still recorded
            further = parked and wait.tier + 1 < len(self._tiers)
            wait.tier += further
            wait.until = self._clock() + _MOST_S if further else float("inf")
        return nbytes if parked else 0

    def _run(self) -> None:
        while True:
            with self._changed:
                # Read once: a conversation deleted meanwhile leaves the dictionary.
                end = min((wait.until for wait in self._waits.values()), default=float("inf"))
                if end == float("inf"):
                    self._thread = None
                    return
                now = self._clock()
                due = [chat for chat, wait in self._waits.items() if wait.until <= now]
                if not due:
                    self._changed.wait(max(0.0, end - now))
            for chat in due:
                self._park(chat)
                del chat
            del due  # the thread keeps no conversation alive
