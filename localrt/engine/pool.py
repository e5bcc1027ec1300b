"""Sessions of one model, kept for their prefixes.

A request gets the idle session that already holds most of its prompt; a new one is made while
there are few, else the one that costs least to read again is recycled. Where another shares the
prompt's beginning (a branch of a conversation, a system prompt), that is copied. It knows tokens,
not text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from localrt.engine.idle_sessions import IdleSessions
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
        self._idle = IdleSessions()
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
            idle, self._idle = self._idle, IdleSessions()
        for session in idle:
            session.close()

    def _take(self, prompt: Sequence[int], mix: Mix) -> EngineSession:
        with self._lock:
            shared = {
                session: common_prefix(session.tokens, prompt) if session.mix == mix else 0
                for session in self._idle
            }
            # A session is worth taking over only if the prompt continues most of what it holds.
            best = max(reversed(shared), key=shared.__getitem__, default=None)
            if best is not None and 2 * shared[best] > len(best.tokens):
                return self._idle.take(best)
            source = best if best is not None and shared[best] >= _LEAST_COPIED else None
            if len(self._idle) < self._keep:
                session = self._engine.session(self._capacity)
            elif (session := self._idle.evict()) is not source:
                session.trim(0)
            if session is not source:
                session.use(mix)
            if source is not None and session is not source:
                try:
                    session.copy_prefix(source, shared[source])
                except MemoryBudgetError:  # computed anew, as far as there is room
                    session.trim(0)
            return session

    def _give_back(self, session: EngineSession) -> None:
        with self._lock:
            if self._closed:
                drop = [session]
            else:
                self._idle.add(session)
                drop = [self._idle.evict() for _ in range(len(self._idle) - self._keep)]
        for old in drop:
            old.close()
