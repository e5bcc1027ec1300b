"""Sessions that nobody uses now, kept for whoever goes on with what they hold.

Where one has to go, it is the one that costs least to read again: a long conversation outlives many
short prompts that come between two of its turns, but not for ever (GreedyDual, Young 1994). Tokens
that another one holds too cost nothing. The latest stays as long as two can: whoever has just been
answered often goes on. It does not know how many may stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from localrt.engine.protocol import EngineSession
from localrt.models.prefix import common_prefix

__all__ = ["IdleSessions"]


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
