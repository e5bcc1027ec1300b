"""Sequences one after another, for an engine that cannot join them in a pass.

It has the face of ``Schedule``, with the loop in place of passes: a step is
one chunk of the sequence that runs. One that pauses keeps its session, and another runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from localrt.engine.batch.job import Items, Job, Owner
from localrt.engine.batch.schedule import Waiting
from localrt.engine.loop import generate
from localrt.engine.pool import SessionPool
from localrt.engine.protocol import Engine, EngineSession
from localrt.engine.types import Chunk
from localrt.errors import LocalrtError
from localrt.models.tokenizers.base import Tokenizer

__all__ = ["OneByOne"]


class OneByOne(Generic[Owner]):
    """See ``Schedule``. Idle sessions stay, ``keep`` of them, for those that go on with their text.

    Not thread-safe.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        waiting: Waiting[Owner],
        *,
        ctx: int,
        keep: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._waiting = waiting
        self._pool = SessionPool(engine, ctx, keep=keep)
        self._running: Job[Owner] | None = None
        # Of the one that runs and of those that pause.
        self._streams: dict[Job[Owner], Iterator[Chunk]] = {}
        self._sessions: dict[Job[Owner], EngineSession] = {}
        self.passes = 0

    @property
    def jobs(self) -> list[Job[Owner]]:
        """The sequence that runs, if any."""
        running = self._running  # once: others look while it ends
        return [] if running is None else [running]

    @property
    def held_bytes(self) -> int:
        """Bytes that the caches of started sequences take now."""
        return sum(session.nbytes for session in list(self._sessions.values()))

    def step(self) -> list[tuple[Job[Owner], Items]]:
        """The next chunk of the sequence that runs, or of the next one."""
        if self._running is None:
            if self._waiting.first() is None:
                return []
            self._running = self._waiting.pop()
        job = self._running
        items: Items
        try:
            if job not in self._streams:
                self._streams[job] = self._stream(job)
            chunk = next(self._streams[job])
            self.passes += len(chunk.token_ids)
            job.done = chunk.finish_reason is not None
            items = [chunk]
        except LocalrtError as error:
            items = job.fail(error)
        if job.done:
            self._leave(job)
        return [(job, items)]

    def remove(self, job: Job[Owner]) -> None:
        """``job`` pauses, or has failed."""
        if self._running is job:
            self._running = None
        if job.done:
            self._leave(job)

    def end(self, job: Job[Owner]) -> Items:
        """``job`` leaves, started or not; its last chunk."""
        job.request.cancel.set()
        chunks: list[Chunk | LocalrtError] = []
        try:
            chunks += self._streams.get(job, ())
        except LocalrtError as error:
            chunks += job.fail(error)
        if not chunks:
            chunks = [job.end("cancelled")]
        job.done = True
        self._leave(job)
        return chunks

    def rest(self, keep: int | None = None) -> None:
        """Nothing to do: the pool keeps what it may."""

    def close(self) -> None:
        """Free all caches."""
        for job in list(self._streams):
            self._leave(job)
        self._pool.close()

    def _stream(self, job: Job[Owner]) -> Iterator[Chunk]:
        with self._pool.lease(job.request.prompt) as session:
            self._sessions[job] = session
            try:
                yield from generate(session, self._tokenizer, job.request)
            finally:
                del self._sessions[job]

    def _leave(self, job: Job[Owner]) -> None:
        if self._running is job:
            self._running = None
        stream = self._streams.pop(job, None)
        close = getattr(stream, "close", None)
        if close is not None:
            close()
