"""Responses of the last hour, in memory, so that a next one can follow on them by their id."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.server.errors import to_json

_MOST = 1000
_MOST_BYTES = 64 << 20
_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A ``response`` as its client got it, and the ``items`` that it answers, the earlier ones too.

    ``nbytes`` is about what it takes, ``since`` when it was put away.
    """

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    nbytes: int
    since: float

    def conversation(self) -> list[dict[str, Any]]:
        """All items, to the end of the response."""
        return [*self.items, *self.response.get("output", ())]


class ResponseStore:
    """Bounded in number, bytes and seconds: the oldest go first. For one event loop."""

    def __init__(
        self,
        *,
        most: int = _MOST,
        most_bytes: int = _MOST_BYTES,
        seconds: float = _SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._most_bytes, self._seconds = most, most_bytes, seconds
        self._now = now
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, tuple[str, dict[str, Any]]] = {}  # the last response that has each
        self._nbytes = 0

    def put(self, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Keep a response to ``items`` under its ``id``."""
        nbytes, name = len(to_json([response, items])), response["id"]
        self._kept[name] = stored = Stored(response, items, nbytes, self._now())
        self._items |= {item["id"]: (name, item) for item in stored.conversation()}
        self._nbytes += nbytes
        self._make_room()

    def get(self, name: str) -> Stored | None:
        """The response of this id, if it is still there."""
        self._make_room()
        return self._kept.get(name)

    def item(self, name: str) -> dict[str, Any] | None:
        """The item of this id, of a response that is still there."""
        self._make_room()
        return self._items.get(name, ("", None))[1]

    def remove(self, name: str) -> None:
        """Forget the response of this id."""
        stored = self._kept.pop(name)
        self._nbytes -= stored.nbytes
        for item in stored.conversation():
            if self._items.get(item["id"], ("",))[0] == name:
                del self._items[item["id"]]

    def _make_room(self) -> None:
        while self._kept:
            oldest = next(iter(self._kept))
            full = len(self._kept) > self._most or self._nbytes > self._most_bytes
            if not full and self._now() - self._kept[oldest].since <= self._seconds:
                break
            self.remove(oldest)
