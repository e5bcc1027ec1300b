"""Sequences that share passes: who is on the way, what the next pass computes, whose cache fits.

A pass takes one row of every sequence that is answering and fills up with rows of prompts, so that
weights which are streamed are read once for all (FlexGen's block schedule, Sheng et al. 2023, with
prompts joining as others finish, as in Orca, Yu et al. 2022, and Sarathi, Agrawal et al. 2023).
Where they were given what guesses, sequences guess ahead. What a sequence says does
not depend on its company: sampling, stops and limits are the loop's. It does not know who asked,
threads, or where the weights lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, runtime_checkable

from localrt.engine.batch.guessing import Prompt, SharedGuesses, TreeBatchEngine
from localrt.engine.batch.job import Items, Job, Owner
from localrt.engine.loop import common_prefix
from localrt.engine.protocol import Check, EngineInfo, EngineSession, Logits
from localrt.errors import LocalrtError, MemoryBudgetError
from localrt.models.tokenizers.base import Tokenizer
from localrt.quant.ops.kv_growth import grown_capacity

__all__ = ["MOST_SEQUENCES", "BatchEngine", "Schedule", "Terms", "Waiting"]

# More rows of a decode pass gain little: from here on products are bound by arithmetic.
MOST_SEQUENCES = 64


@runtime_checkable
class BatchEngine(Protocol):
    """An ``Engine`` that can extend several of its sessions in one pass."""

    @property
    def info(self) -> EngineInfo:
        """What runs."""

    @property
    def pass_rows(self) -> int:
        """The most rows of one pass."""

    def kv_nbytes(self, length: int) -> int:
        """Bytes of one sequence's cache once grown to ``length`` tokens."""

    def free_memory(self) -> int | None:
        """Bytes free on the device's own memory; None where caches lie in RAM."""

    def reclaimable(self) -> int:
        """Bytes of weights in RAM that would be streamed where caches need their room."""

    def session(self, capacity: int) -> EngineSession:
        """A new, empty session for up to ``capacity`` tokens."""

    def extend_batch(
        self,
        parts: Sequence[tuple[EngineSession, Sequence[int]]],
        *,
        wanted: Sequence[int],
        check: Check | None = None,
    ) -> Logits:
        """One pass that appends tokens to several sessions, ``pass_rows`` in all at most.

        Returns the logits after the last token of the parts numbered in ``wanted``, shape
        (len(wanted), vocab), the caller's own. When it raises, no session has changed: what
        ``check`` raises, or ``MemoryBudgetError`` where the caches have no room to grow.
        """


class Waiting(Protocol[Owner]):
    """The jobs that have not started, or have to start again."""

    def first(self) -> Job[Owner] | None:
        """Whose turn it is; None where nobody waits."""

    def pop(self) -> Job[Owner]:
        """Take that one out."""

    def put_back(self, job: Job[Owner]) -> None:
        """``job`` comes before all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a schedule shares passes and memory.

    ``most`` sequences share a pass. A cache is made for ``capacity`` tokens (None: for what its
    sequence needs), and an answer joins where there is room for ``ahead`` tokens of it (None: for
    all that it may say). ``keep`` caches of sequences that have left stay for those that go on
    with their text. Beside answers a pass takes ``prompt_rows`` rows of prompts (None: as many as
    go in), which prompts share in equal parts where ``evenly``, else in their order.
    """

    most: int = MOST_SEQUENCES
    capacity: int | None = None
    ahead: int | None = None
    keep: int = 0
    prompt_rows: int | None = None
    evenly: bool = False


class Schedule(Generic[Owner]):
    """Which sequences are on their way, and what the next pass computes. Not thread-safe.

    ``room`` says how many bytes the caches may take in all, ``check`` raises to abandon a pass.
    """

    def __init__(
        self,
        engine: BatchEngine,
        tokenizer: Tokenizer | None,
        waiting: Waiting[Owner],
        terms: Terms,
        *,
        room: Callable[[], int],
        check: Check,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._waiting = waiting
        self._terms = terms
        self._room = room
        self._check = check
        self._most = self._limit = min(terms.most, engine.pass_rows)
        self._live: list[tuple[Job[Owner], EngineSession]] = []  # in the order of joining
        self._idle: list[EngineSession] = []  # of those that have left; the latest at the end
        self._kv: dict[int, int] = {}  # bytes of a cache by its tokens
        self._shared: SharedGuesses[Owner] | None = None
        if isinstance(engine, TreeBatchEngine):
            self._shared = SharedGuesses(engine, check)
        self.passes = 0

    @property
    def jobs(self) -> list[Job[Owner]]:
        """The sequences on their way."""
        return [job for job, _ in self._live]

    @property
    def held_bytes(self) -> int:
        """Bytes that caches take now."""
        return sum(session.nbytes for _, session in self._live) + self._idle_bytes()

    def step(self) -> list[tuple[Job[Owner], Items]]:
        """Let those in who have room, compute one pass, and let those out who have finished.

        Raises:
            MemoryBudgetError: a sequence that is alone has no room; others wait for it.
            LocalrtError: the pass failed, or what ``check`` raises; all are as they were.
        """
        items = self._join()
        if self._terms.ahead is not None:
            self._make_room()
        items += self._guessed() or self._advance()
        if any(job.done for job, _ in self._live):
            for job in self.jobs:
                if job.done:
                    self.remove(job)
            self._most = self._limit
        return items

    def remove(self, job: Job[Owner]) -> None:
        """``job`` leaves; its cache stays for whoever goes on with its text."""
        job.settle()
        self._idle += [session for other, session in self._live if other is job]
        self._live = [(other, session) for other, session in self._live if other is not job]

    def end(self, job: Job[Owner]) -> Items:
        """``job`` leaves, started or not; its last chunk."""
        self.remove(job)
        return [job.end("cancelled")]

    def rest(self, keep: int | None = None) -> None:
        """Free the caches beyond those that are kept, ``keep`` or the usual number."""
        while len(self._idle) > (self._terms.keep if keep is None else keep):
            self._idle.pop(0).close()

    def close(self) -> None:
        """Free all caches."""
        for job in self.jobs:
            job.settle()
        for session in [*self._idle, *(session for _, session in self._live)]:
            session.close()
        self._idle, self._live = [], []

    def cost(self, job: Job[Owner], session: EngineSession | None = None) -> int:
        """Bytes to count for a sequence: of its cache, and of its row of logits."""
        ahead = self._terms.ahead
        tokens = job.capacity if ahead is None else min(job.capacity, job.length + ahead)
        return self._bytes(tokens, session)

    # -- one step --------------------------------------------------------------------------------

    def _join(self) -> list[tuple[Job[Owner], Items]]:
        """Start waiting sequences while there is room; the errors of those that cannot start."""
        failed: list[tuple[Job[Owner], Items]] = []
        while len(self._live) < self._most and (job := self._waiting.first()) is not None:
            try:
                session = self._session(job)
            except LocalrtError as error:
                self._waiting.pop()
                failed.append((job, job.fail(error)))
                continue
            if session is None:
                break
            self._waiting.pop()
            self._live.append((job, session))
            job.start(session, self._tokenizer)
        self.rest()
        return failed

    def _session(self, job: Job[Owner]) -> EngineSession | None:
        """One left over that begins like the job, or a new one; None when out of room."""
        session = self._left_over(job)
        room = self._room() - sum(self.cost(*running) for running in self._live)
        needed = self.cost(job, session)
        if self._live and needed > room:
            return None
        if session is not None:
            self._idle.remove(session)
        while self._idle and needed + self._idle_bytes() > room:
            self._idle.pop(0).close()
        if session is not None:
            return session
        return self._engine.session(self._terms.capacity or job.capacity)

    def _left_over(self, job: Job[Owner]) -> EngineSession | None:
        """The idle session that holds the most of what ``job`` begins with, if it is worth it."""
        best, most = None, 0
        for session in self._idle:
            shared = common_prefix(session.tokens, job.tokens)
            # One that is kept is worth taking over only by who continues most of what it holds.
            worth = not self._terms.keep or 2 * shared > len(session.tokens)
            if shared > most and worth and session.capacity >= job.capacity:
                best, most = session, shared
        return best

    def _make_room(self) -> None:
        """Where answers have outgrown what was counted for them, those that joined last wait."""
        room = self._room()
        while len(self._live) > 1:
            needed = sum(self._bytes(job.length, session) for job, session in self._live)
            while self._idle and needed + self._idle_bytes() > room:
                self._idle.pop(0).close()
            if needed <= room:
                break
            self._postpone()

    def _guessed(self) -> list[tuple[Job[Owner], Items]]:
        """What a sequence that is alone gets from guessing ahead; nothing where it does not."""
        if len(self._live) != 1:
            for job in self.jobs:
                job.not_alone()
            return []
        ((job, session),) = self._live
        steps = job.guessing(session)
        if steps is None:
            return []
        passes = steps.passes
        try:
            return [(job, job.guessed(steps, self._check))]
        except MemoryBudgetError:  # a pass without guesses needs less
            job.guess_no_more()
            return []
        finally:
            self.passes += steps.passes - passes

    def _advance(self) -> list[tuple[Job[Owner], Items]]:
        """Compute one pass; what follows for the sequences that have no more pending tokens."""
        parts = self._parts()
        if not parts:
            return []
        if len(self._live) > 1 and (said := self._with_guesses(parts)) is not None:
            return said
        whole = [i for i, (job, _, tokens) in enumerate(parts) if len(tokens) == len(job.pending)]
        try:
            logits = self._engine.extend_batch(
                [(session, tokens) for _, session, tokens in parts],
                wanted=whole,
                check=self._check,
            )
        except MemoryBudgetError:
            if len(self._live) == 1 and not self._idle:
                raise
            logits = None
        if logits is None:  # not above: the error keeps caches from being freed
            if self._idle:
                self._idle.pop(0).close()
            else:
                self._postpone()
            return []
        self.passes += 1
        for job, _, tokens in parts:
            job.pending = job.pending[len(tokens) :]
        return [
            (parts[i][0], parts[i][0].accept(row)) for i, row in zip(whole, logits, strict=True)
        ]

    def _with_guesses(
        self, parts: Sequence[Prompt[Owner]]
    ) -> list[tuple[Job[Owner], Items]] | None:
        """A pass of these, and of guesses behind the answers; None where nobody guesses."""
        running = [(job, session) for job, session, _ in parts if len(job.pending) == 1]
        if self._shared is None or not running:
            return None
        said = self._shared.advance(running, [part for part in parts if len(part[0].pending) > 1])
        self.passes += said is not None
        return said

    def _parts(self) -> list[Prompt[Owner]]:
        """What the next pass appends to which session; answers come before prompts."""
        ready = [(job, session) for job, session in self._live if len(job.pending) == 1]
        prompts = [(job, session) for job, session in self._live if len(job.pending) > 1]
        room = self._engine.pass_rows - len(ready)
        if ready and self._terms.prompt_rows is not None:
            room = min(room, max(self._terms.prompt_rows, len(prompts)))
        if self._terms.evenly:
            prompts.sort(key=lambda running: len(running[0].pending))  # what one leaves, others get
        parts = [(job, session, job.pending) for job, session in ready]
        for place, (job, session) in enumerate(prompts):
            share = room // (len(prompts) - place) if self._terms.evenly else room
            tokens = job.pending[:share]
            room -= len(tokens)
            if tokens:
                parts.append((job, session, tokens))
        return parts

    def _postpone(self) -> None:
        """Memory is short: the last to join gives its cache back, and is computed again later."""
        job, session = self._live.pop()
        session.close()
        self._waiting.put_back(job)
        self._most = len(self._live)

    # -- bytes -----------------------------------------------------------------------------------

    def _bytes(self, tokens: int, session: EngineSession | None) -> int:
        size = grown_capacity(tokens)
        if size not in self._kv:
            self._kv[size] = self._engine.kv_nbytes(size)
        held = 0 if session is None else session.nbytes
        return max(self._kv[size], held) + 4 * self._engine.info.vocab_size

    def _idle_bytes(self) -> int:
        return sum(session.nbytes for session in self._idle)
