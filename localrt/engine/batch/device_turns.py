"""Turns of several models on one device: one pass at a time, the earliest deadline first.

Two simultaneous passes on the same cores take longer than two consecutive ones, since each waits
for threads that the other has displaced. Background work of one model waits for chats of another,
and a chat waits for a completion unless its own next token would be late (earliest deadline first,
Liu and Layland 1973).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_BACKGROUND_WAIT_S = 0.3  # background work gets a turn after this many seconds
_BACKGROUND_EXTRA_S = 0.6  # but waits up to this much longer for tokens that are due by then
_PASS_S = 0.08  # a pass starts at the latest this long before its token is due


@dataclass(slots=True, eq=False)
class _Request:
    batch: Hashable
    due: float


class PassTurns:
    """A lock for one device, granted to the batch whose next token is due first. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._requests: list[_Request] = []  # oldest first
        self._due: dict[Hashable, float] = {}  # latest deadline of each batch with foreground work

    @contextmanager
    def turn(self, batch: Hashable, due: float) -> Iterator[int]:
        """Lock the device for a pass of ``batch``; yields how many other batches have foreground
        work.

        The next token is ``due`` at this ``time.monotonic()``; infinity means background work.
        Between its passes the batch stays ahead of those with later deadlines, until ``leave``.
        """
        with self._changed:
            self._due.pop(batch, None)
            if due < math.inf:
                self._due[batch] = due
                request = _Request(batch, due)
            else:
                earliest = time.monotonic() + _BACKGROUND_WAIT_S + _PASS_S
                last = max(self._due.values(), default=0.0) + 1e-6  # after all foreground tokens
                request = _Request(batch, max(earliest, min(last, earliest + _BACKGROUND_EXTRA_S)))
            self._requests.append(request)
            while self._busy or self._next() is not request:
                self._changed.wait(None if self._busy else max(1e-3, _wait_s(request)))
            self._requests.remove(request)
            self._busy = True
            others = len(self._due) - (batch in self._due)
        try:
            yield others
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def leave(self, batch: Hashable) -> None:
        """Report that ``batch`` has nothing to compute: nobody waits for its next pass."""
        with self._changed:
            self._due.pop(batch, None)
            self._changed.notify_all()

    def _next(self) -> _Request | None:
        """Return the request to serve; None to wait for a more urgent batch that is between two of
        its passes.
        """
        first = min(self._requests, key=lambda request: request.due)
        earlier = any(due < first.due for batch, due in self._due.items() if batch != first.batch)
        return None if earlier and _wait_s(first) > 0 else first


def _wait_s(request: _Request) -> float:
    """Return how long ``request`` can wait and still meet its deadline."""
    return request.due - _PASS_S - time.monotonic()
