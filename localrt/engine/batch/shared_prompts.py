"""Prompts that begin alike are computed once: others copy the keys and values.

A sequence that joins copies from whichever cache holds the most of it. If another prompt of its
client that begins alike is being read, it waits for that: the answers to one prompt that is asked
for several times read it once. Nobody waits for another client. It does not know passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeAlias

from localrt.engine.batch.sequence import BatchSequence, Owner
from localrt.engine.protocol import EngineSession
from localrt.models.prefix import common_prefix

__all__ = ["Live", "SharedPrompts"]

Live: TypeAlias = Sequence[tuple[BatchSequence[Owner], EngineSession]]

_LEAST = 64  # tokens: fewer are read about as fast


class SharedPrompts(Generic[Owner]):
    """The sequences that wait for a beginning; contains those."""

    def __init__(self) -> None:
        # What each waits for: a session, and how much that will hold.
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
        """``seq`` has started on ``session``, beside ``live`` ones."""
        if session.blocks is None:  # nothing can be copied to it
            return
        tokens = seq.tokens
        alike = [(other, held) for other, held in live if held.mix == session.mix]
        held_by = [*(held for _, held in alike), *(one for one in idle if one.mix == session.mix)]
        least = len(tokens) - len(seq.pending) + _LEAST
        copied = max(held_by, key=lambda held: common_prefix(held.tokens, tokens), default=None)
        most = 0 if copied is None else common_prefix(copied.tokens, tokens)
        for other, held in alike:
            if other.client == seq.client and len(other.pending) > 1:
                shared = min(common_prefix(other.tokens, tokens), len(tokens) - 1)
                if shared >= max(least, most + 1):
                    self._waits[seq], most = (held, shared), shared
        if seq not in self and copied is not None and most >= least:
            _copy(seq, session, copied, live)

    def advance(self, live: Live[Owner]) -> None:
        """Copy what has been computed of what others wait for."""
        for seq, (source, length) in list(self._waits.items()):
            reads = any(held is source and len(other.pending) > 1 for other, held in live)
            if reads and len(source.tokens) < length:
                continue
            del self._waits[seq]
            for other, session in live:
                if other is seq:
                    _copy(seq, session, source, live)

    def leave(self, seq: BatchSequence[Owner]) -> None:
        """``seq`` waits no more."""
        self._waits.pop(seq, None)


def _copy(
    seq: BatchSequence[Owner], session: EngineSession, source: EngineSession, live: Live[Owner]
) -> None:
    for other, held in live:
        if held is source:
            other.settle()  # guesses leave the cache
    seq.copy(session, source)
