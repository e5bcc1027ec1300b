"""Waiting sequences: a fair queue of those to start, and those that wait for a shared prefix."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from localrt.engine.batch.sequence import BatchSequence, Owner
from localrt.engine.pool import LEAST_COPIED
from localrt.engine.protocol import EngineSession
from localrt.quant.ops.kv import common_prefix

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue that serves clients round robin. Thread-safe; one thread calls ``first`` and
    ``take``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[Hashable, deque[T]] = {}  # the next client to serve is first

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._clients.values()))

    def push(self, client: Hashable, item: T) -> None:
        """Add ``item`` after all other items of ``client``."""
        with self._lock:
            self._clients.setdefault(client, deque()).append(item)

    def put_back(self, client: Hashable, item: T) -> None:
        """Put ``item`` before all others of ``client``, and serve that client next."""
        with self._lock:
            items = self._clients.pop(client, deque())
            items.appendleft(item)
            self._clients = {client: items, **self._clients}

    def first(self, order: Callable[[T], Any] = lambda item: 0) -> T | None:
        """Return the first by ``order`` of the clients' next items; None if the queue is empty."""
        with self._lock:
            return min((items[0] for items in self._clients.values()), key=order, default=None)

    def take(self, item: T) -> None:
        """Remove ``item``, which ``first`` returned; its client is then served last."""
        with self._lock:
            for client, items in list(self._clients.items()):
                if items[0] is item:
                    del self._clients[client]
                    items.popleft()
                    if items:
                        self._clients[client] = items
                    return

    def items(self) -> list[T]:
        """Return all waiting items, in arbitrary order."""
        with self._lock:
            return [item for items in self._clients.values() for item in items]

    def remove(self, item: T) -> None:
        """Remove ``item`` (by identity) if it is in the queue."""
        with self._lock:
            for client, items in list(self._clients.items()):
                self._clients[client] = deque(other for other in items if other is not item)
                if not self._clients[client]:
                    del self._clients[client]


Live: TypeAlias = Sequence[tuple[BatchSequence[Owner], EngineSession]]


class SharedPrompts(Generic[Owner]):
    """Sequences that wait while another one computes a shared prefix."""

    def __init__(self) -> None:
        # The session that each sequence waits for, and the length of the shared prefix.
        self._waits: dict[BatchSequence[Owner], tuple[EngineSession, int]] = {}

    def __contains__(self, seq: BatchSequence[Owner]) -> bool:
        return seq in self._waits

    def join(
        self,
        seq: BatchSequence[Owner],
        session: EngineSession,
        live: Live[Owner],
        idle: Iterable[EngineSession],
    ) -> None:
        """``seq`` has started on ``session``: copy a prefix from others to it, or wait for one."""
        if session.blocks is None:  # prefixes cannot be copied to it
            return
        tokens = seq.tokens
        running = [(other, theirs) for other, theirs in live if theirs.mix == session.mix]
        sessions = [theirs for _, theirs in running]
        sessions += [candidate for candidate in idle if candidate.mix == session.mix]
        least = len(tokens) - len(seq.pending) + LEAST_COPIED
        source = max(sessions, key=lambda one: common_prefix(one.tokens, tokens), default=None)
        most = 0 if source is None else common_prefix(source.tokens, tokens)
        for other, theirs in running:
            if other.client == seq.client and len(other.pending) > 1:
                shared = min(common_prefix(other.tokens, tokens), len(tokens) - 1)
                if shared >= max(least, most + 1):
                    self._waits[seq], most = (theirs, shared), shared
        if seq not in self and source is not None and most >= least:
            _copy(seq, session, source, live)

    def advance(self, live: Live[Owner]) -> None:
        """Copy each shared prefix that has been computed to the sequences that wait for it."""
        for seq, (source, length) in list(self._waits.items()):
            reads = any(theirs is source and len(other.pending) > 1 for other, theirs in live)
            if reads and len(source.tokens) < length:
                continue
            del self._waits[seq]
            for other, session in live:
                if other is seq:
                    _copy(seq, session, source, live)

    def leave(self, seq: BatchSequence[Owner]) -> None:
        """Stop waiting."""
        self._waits.pop(seq, None)


def _copy(
    seq: BatchSequence[Owner], session: EngineSession, source: EngineSession, live: Live[Owner]
) -> None:
    for other, theirs in live:
        if theirs is source:
            other.settle()  # draft tokens leave the cache
    seq.copy(session, source)
