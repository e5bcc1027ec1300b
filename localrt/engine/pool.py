"""Prefix caching: sessions of one model, kept to reuse their prefixes, and room for their caches.

A request gets the idle session that already holds most of its prompt. While there are few sessions,
a new one is made; otherwise the one that is cheapest to compute again is reused (GreedyDual, Young
1994): a long conversation outlives many short prompts between its turns, but not for ever. If
another session shares the prompt's beginning (a branch of a conversation, a system prompt), that
beginning is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from localrt.common.errors import MemoryBudgetError
from localrt.engine.protocol import Engine, EngineSession
from localrt.offload.memory import current_rss, ram_budget
from localrt.quant.ops.adapters import Mix
from localrt.quant.ops.kv import common_prefix


class IdleSessions:
    """Idle sessions with their worth, in the order in which they were added. Not thread-safe."""

    def __init__(self) -> None:
        self._worth: dict[EngineSession, int] = {}
        self._floor = 0  # the worth of the last evicted session

    def __len__(self) -> int:
        return len(self._worth)

    def __iter__(self) -> Iterator[EngineSession]:
        return iter(list(self._worth))

    @property
    def nbytes(self) -> int:
        """The bytes that their caches take."""
        return sum(session.nbytes for session in self._worth)

    def shared(self, tokens: Sequence[int], mix: Mix) -> dict[EngineSession, int]:
        """Return how many of ``tokens``, from the first on, each session with ``mix`` holds."""
        alike = (session for session in self._worth if session.mix == mix)
        return {session: common_prefix(session.tokens, tokens) for session in alike}

    def add(self, session: EngineSession) -> None:
        """Keep ``session``, which has just been used."""
        shared = max(self.shared(session.tokens, session.mix).values(), default=0)
        self._worth[session] = self._floor + len(session.tokens) - shared

    def take(self, session: EngineSession) -> EngineSession:
        """Remove ``session``, which is in use again, and return it."""
        del self._worth[session]
        return session

    def evict(self) -> EngineSession:
        """Remove and return the session that is cheapest to compute again."""
        kept = list(self._worth)
        session = min(kept[:-1] if len(kept) > 2 else kept, key=self._worth.__getitem__)
        self._floor = self._worth.pop(session)
        return session


LEAST_COPIED = 64  # tokens: shorter prefixes are computed about as fast as copied


def copy_prefix(session: EngineSession, source: EngineSession, length: int) -> None:
    """Copy the first ``length`` tokens of ``source`` to ``session``, or none without room."""
    with suppress(MemoryBudgetError):
        session.copy_prefix(source, length)


class SessionPool:
    """Thread-safe. Keeps at most ``keep`` idle sessions; more may run at the same time."""

    def __init__(self, engine: Engine, capacity: int, keep: int = 4) -> None:
        self._engine = engine
        self._capacity = capacity
        self._keep = keep
        self._idle = IdleSessions()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def lease(self, prompt: Sequence[int], mix: Mix = ()) -> Iterator[EngineSession]:
        """Yield a session for ``prompt``, which no one else uses until the block ends.

        It computes with the adapter set ``mix``.
        """
        session = self._take(prompt, mix)
        try:
            yield session
        finally:
            self._give_back(session)

    def close(self) -> None:
        """Free the idle sessions, and the others once they are returned."""
        self._closed = True
        self.drop()

    def drop(self, marks: frozenset[str] = frozenset()) -> None:
        """Free the idle sessions, whatever they hold; new ones are made when needed."""
        with self._lock:
            idle, self._idle = self._idle, IdleSessions()
        for session in idle:
            session.close()

    def _take(self, prompt: Sequence[int], mix: Mix) -> EngineSession:
        with self._lock:
            shared = self._idle.shared(prompt, mix)
            # A session is reused only if the prompt continues most of its tokens.
            best = max(reversed(shared), key=shared.__getitem__, default=None)
            if best is not None and 2 * shared[best] > len(best.tokens):
                return self._idle.take(best)
            source = best if best is not None and shared[best] >= LEAST_COPIED else None
            if len(self._idle) < self._keep:
                session = self._engine.session(self._capacity)
            elif (session := self._idle.evict()) is not source:
                session.trim(0)
            if session is not source:
                session.use(mix)
            if source is not None and session is not source:
                copy_prefix(session, source, shared[source])
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


_KV_SHARE = 0.8  # of free memory; the rest is for activations and other programs


def caches_on_gpu(engine: Engine) -> bool:
    """Return whether KV caches lie on a GPU, with all layers or some."""
    plan = engine.plan
    return engine.free_memory() is not None or (plan is not None and "vram" in plan.placement.kv)


def kv_room(engine: Engine) -> int:
    """Return how many more bytes of KV caches fit the budgets, on the device where caches lie.

    Weights that would be streamed instead count as room: a pass reads them once for all sequences.
    """
    use, free = engine.gpu_use, engine.free_memory()
    if use is not None and caches_on_gpu(engine):
        room = use.limit - use.used + use.leavable
        room = room if free is None else min(free, room)
    else:
        room = ram_budget(engine.ram) - current_rss() + engine.weights.memory.reclaimable
    return max(0, int(room * _KV_SHARE))


def ram_room(engine: Engine) -> int:
    """Return how many bytes of RAM the caches of a GPU's model may take that nothing else uses;
    below zero if RAM is short, 0 if its caches are in RAM anyway.
    """
    if not caches_on_gpu(engine):
        return 0
    left, memory = ram_budget(engine.ram) - current_rss(), engine.weights.memory
    return int((min(left, memory.spare) if memory.streams else left) * _KV_SHARE)
