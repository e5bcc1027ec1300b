"""Turns of several models' batches: one pass at a time, and what is due first.

Two passes at once on the same cores take longer than one after the other: each waits for threads
that the other has displaced. Background work of one model gives way to chats of another, and a chat
to a completion as long as its own next token is not late (earliest deadline first, Liu and Layland
1973).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PATIENCE_S = 0.3  # background work takes a turn after that long, whatever others want
_LONGER_S = 0.6  # so much later still, if somebody wants a token by then
_AHEAD_S = 0.08  # before its token is due a batch stops waiting for others': its pass takes time


@dataclass(slots=True, eq=False)
class _Waiting:
    batch: Hashable
    due: float


class PassTurns:
    """Turns that the batches of several models take. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._waiting: list[_Waiting] = []  # in the order of asking
        # When the next token of each batch with work that somebody waits for was due, at its last
        # turn.
        self._due: dict[Hashable, float] = {}

    @contextmanager
    def turn(self, batch: Hashable, due: float) -> Iterator[int]:
        """Hold the turn for a pass of ``batch``; yields how many others have work that is due.

        Somebody wants its next token at ``due`` in ``time.monotonic()``'s seconds (infinity: it is
        background work). The batch keeps its place before later ones between its passes too, until
        ``rest``.
        """
        with self._changed:
            self._due.pop(batch, None)
            if due < math.inf:
                self._due[batch] = due
                mine = _Waiting(batch, due)
            else:
                patient = time.monotonic() + _PATIENCE_S + _AHEAD_S
                wanted = max(self._due.values(), default=0.0) + 1e-6  # after the last of them
                mine = _Waiting(batch, max(patient, min(wanted, patient + _LONGER_S)))
            self._waiting.append(mine)
            while self._busy or self._next() is not mine:
                self._changed.wait(None if self._busy else max(1e-3, _wait_s(mine)))
            self._waiting.remove(mine)
            self._busy = True
            others = len(self._due) - (batch in self._due)
        try:
            yield others
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def rest(self, batch: Hashable) -> None:
        """``batch`` has nothing to compute for now."""
        with self._changed:
            self._due.pop(batch, None)
            self._changed.notify_all()

    def _next(self) -> _Waiting | None:
        """Return whose turn it is; None if it is better to wait for a batch between two passes."""
        first = min(self._waiting, key=lambda one: one.due)
        earlier = any(due < first.due for batch, due in self._due.items() if batch != first.batch)
        return None if earlier and _wait_s(first) > 0 else first


def _wait_s(one: _Waiting) -> float:
    """Return how long it waits for others between their passes."""
    return one.due - _AHEAD_S - time.monotonic()
