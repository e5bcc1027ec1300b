"""Sessions of one model, kept for their prefixes.

A request gets the idle session that already holds most of its prompt; a new one is made while
there are few, else the one unused longest is recycled. Where another shares the prompt's beginning
(a branch of a conversation, a system prompt), that is copied. It knows tokens, not text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from localrt.engine.protocol import Engine, EngineSession
from localrt.errors import MemoryBudgetError
from localrt.models.prefix import common_prefix
from localrt.quant.ops.adapters import Mix

__all__ = ["SessionPool"]

_LEAST_COPIED = 64  # tokens: fewer are read about as fast


class SessionPool:
    """Thread-safe. At most ``keep`` idle sessions stay; more may run at the same time."""

    def __init__(self, engine: Engine, capacity: int, keep: int = 4) -> None:
        self._engine = engine
        self._capacity = capacity
        self._keep = keep
        self._idle: list[EngineSession] = []  # the one used last at the end
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def lease(self, prompt: Sequence[int], mix: Mix = ()) -> Iterator[EngineSession]:
        """The session to run ``prompt`` on, for the caller alone until the block ends.

        It computes with the adapters ``mix``.
        """
        session = self._take(prompt, mix)
        try:
            yield session
        finally:
            self._give_back(session)

    def close(self) -> None:
        """Free the idle sessions, and the others as they come back."""
        self._closed = True
        self.free()

    def free(self) -> None:
        """Free the idle sessions; others are made when they are needed."""
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def _take(self, prompt: Sequence[int], mix: Mix) -> EngineSession:
        with self._lock:
            shared = [
                common_prefix(session.tokens, prompt) if session.mix == mix else 0
                for session in self._idle
            ]
            # A session is worth taking over only if the prompt continues most of what it holds.
            best = max(range(len(shared)), key=lambda i: (shared[i], i), default=None)
            if best is not None and 2 * shared[best] > len(self._idle[best].tokens):
                return self._idle.pop(best)
            source = None
            if best is not None and shared[best] >= _LEAST_COPIED:
                source = self._idle[best]
            if len(self._idle) < self._keep:
                session = self._engine.session(self._capacity)
            elif (session := self._idle.pop(0)) is not source:
                session.trim(0)
            if session is not source:
                session.use(mix)
            if best is not None and source is not None and session is not source:
                try:
                    session.copy_prefix(source, shared[best])
                except MemoryBudgetError:  # computed anew, as far as there is room
                    session.trim(0)
            return session

    def _give_back(self, session: EngineSession) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(session)
                drop = self._idle[: -self._keep]
                del self._idle[: -self._keep]
            else:
                drop = [session]
        for old in drop:
            old.close()
