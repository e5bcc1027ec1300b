"""Turns of several models' batches: one pass at a time, those that somebody waits for first.

Two passes at once on the same cores take longer than one after the other: each waits for threads
that the other has displaced. Background work of one model gives way to chats of another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_PATIENCE_S = 0.3  # background work takes a turn after that long, whatever others want


@dataclass(slots=True, eq=False)
class _Waiting:
    urgent: bool
    since: float = field(default_factory=time.monotonic)


class PassTurns:
    """Turns that the batches of several models take. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._waiting: list[_Waiting] = []  # in the order of asking
        self._urgent: set[Hashable] = set()  # batches with work that somebody waits for

    @contextmanager
    def turn(self, batch: Hashable, *, urgent: bool) -> Iterator[None]:
        """Hold the turn for a pass of ``batch``, which has ``urgent`` work or background work only.

        A batch with urgent work keeps others' background work waiting between its passes too, until
        ``rest``.
        """
        mine = _Waiting(urgent)
        with self._changed:
            (self._urgent.add if urgent else self._urgent.discard)(batch)
            self._waiting.append(mine)
            while self._busy or self._next() is not mine:
                self._changed.wait(_PATIENCE_S)
            self._waiting.remove(mine)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def rest(self, batch: Hashable) -> None:
        """``batch`` has nothing to compute for now."""
        with self._changed:
            self._urgent.discard(batch)
            self._changed.notify_all()

    def _next(self) -> _Waiting | None:
        now = time.monotonic()
        for one in self._waiting:
            if not one.urgent and now - one.since >= _PATIENCE_S:
                return one
        for one in self._waiting:
            if one.urgent:
                return one
        return None if self._urgent else self._waiting[0]
