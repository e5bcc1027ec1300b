"""Sessions of one model, kept for the prefixes that they hold.

A request gets the idle session that already holds most of its prompt. A new one is made while there
are few; else the one that costs least to compute again is reused (GreedyDual, Young 1994): a long
conversation outlives many short prompts between two of its turns, but not for ever. Where another
session shares the prompt's beginning (a branch of a conversation, a system prompt), that is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from localrt.common.errors import MemoryBudgetError
from localrt.engine.protocol import Engine, EngineSession
from localrt.models.prefix import common_prefix
from localrt.quant.ops.adapters import Mix


class IdleSessions:
    """Not thread-safe. Iterates from the one kept longest to the latest."""

    def __init__(self) -> None:
        self._worth: dict[EngineSession, int] = {}
        self._floor = 0  # what the last one that had to go was worth

    def __len__(self) -> int:
        return len(self._worth)

    def __iter__(self) -> Iterator[EngineSession]:
        return iter(list(self._worth))

    @property
    def nbytes(self) -> int:
        """Bytes that their caches take."""
        return sum(session.nbytes for session in self._worth)

    def add(self, session: EngineSession) -> None:
        """Keep ``session``, which has just been used."""
        tokens = session.tokens
        others = (other.tokens for other in self._worth if other.mix == session.mix)
        shared = max((common_prefix(other, tokens) for other in others), default=0)
        self._worth[session] = self._floor + len(tokens) - shared

    def take(self, session: EngineSession) -> EngineSession:
        """``session``, which somebody uses again."""
        del self._worth[session]
        return session

    def evict(self) -> EngineSession:
        """The one that costs least to read again, which is kept no more."""
        kept = list(self._worth)
        session = min(kept[:-1] if len(kept) > 2 else kept, key=self._worth.__getitem__)
        self._floor = self._worth.pop(session)
        return session


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
