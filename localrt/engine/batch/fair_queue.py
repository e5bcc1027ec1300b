"""A queue in which clients take turns: first come, first served among the requests of each.

Who asks for a hundred things delays others by one. It knows neither requests nor threads' work; any
thread may use it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Thread-safe; between ``first`` and ``pop`` by one thread, others may only push."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: deque[T] = deque()
        self._clients: dict[Hashable, deque[T]] = {}  # in the order of their turns

    def __len__(self) -> int:
        with self._lock:
            return len(self._ahead) + sum(map(len, self._clients.values()))

    def push(self, client: Hashable, item: T) -> None:
        """``item`` comes after all of ``client``."""
        with self._lock:
            self._clients.setdefault(client, deque()).append(item)

    def put_back(self, item: T) -> None:
        """``item`` comes before all others."""
        with self._lock:
            self._ahead.appendleft(item)

    def first(self) -> T | None:
        """Whose turn it is; None where nobody waits."""
        with self._lock:
            if self._ahead:
                return self._ahead[0]
            return next((items[0] for items in self._clients.values()), None)

    def pop(self) -> T:
        """Take that one out; the next turn is another client's.

        Raises:
            IndexError: nobody waits.
        """
        with self._lock:
            if self._ahead:
                return self._ahead.popleft()
            if not self._clients:
                raise IndexError("nobody waits")
            client = next(iter(self._clients))
            items = self._clients.pop(client)
            item = items.popleft()
            if items:
                self._clients[client] = items
            return item

    def items(self) -> list[T]:
        """All that wait, in no promised order."""
        with self._lock:
            return [*self._ahead, *(item for items in self._clients.values() for item in items)]

    def remove(self, item: T) -> None:
        """Take out ``item`` (by identity), if it waits."""
        with self._lock:
            self._ahead = deque(other for other in self._ahead if other is not item)
            for client, items in list(self._clients.items()):
                self._clients[client] = deque(other for other in items if other is not item)
                if not self._clients[client]:
                    del self._clients[client]
