"""A queue in which clients take turns: first come, first served among the requests of each.

A client that asks for a hundred things delays others by one. It knows neither requests nor threads'
work; any thread may use it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Thread-safe; between ``first`` and ``take`` by one thread, others may only push."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[Hashable, deque[T]] = {}  # in the order of their turns

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._clients.values()))

    def push(self, client: Hashable, item: T) -> None:
        """``item`` comes after all of ``client``."""
        with self._lock:
            self._clients.setdefault(client, deque()).append(item)

    def put_back(self, client: Hashable, item: T) -> None:
        """``item`` comes before all of ``client``, whose turn it is."""
        with self._lock:
            items = self._clients.pop(client, deque())
            items.appendleft(item)
            self._clients = {client: items, **self._clients}

    def first(self, load: Mapping[Hashable, int] | None = None) -> T | None:
        """Whose turn it is, among the clients of the least ``load``; None where nobody waits."""
        with self._lock:
            clients = self._clients
            if not clients:
                return None
            return clients[min(clients, key=lambda client: (load or {}).get(client, 0))][0]

    def take(self, item: T) -> None:
        """Take out ``item``, which is the ``first``; the next turn is another client's."""
        with self._lock:
            for client, items in list(self._clients.items()):
                if items[0] is item:
                    del self._clients[client]
                    items.popleft()
                    if items:
                        self._clients[client] = items
                    return

    def items(self) -> list[T]:
        """All that wait, in no promised order."""
        with self._lock:
            return [item for items in self._clients.values() for item in items]

    def remove(self, item: T) -> None:
        """Take out ``item`` (by identity), if it waits."""
        with self._lock:
            for client, items in list(self._clients.items()):
                self._clients[client] = deque(other for other in items if other is not item)
                if not self._clients[client]:
                    del self._clients[client]
