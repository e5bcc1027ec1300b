"""Sequences that share passes: who is on the way, what the next pass computes, whose cache fits.

A pass takes one row of every sequence that is answering and fills up with rows of prompts, so that
weights which are streamed are read once for all (FlexGen's block schedule, Sheng et al. 2023, with
prompts joining as others finish, as in Orca, Yu et al. 2022, and Sarathi, Agrawal et al. 2023).
A sequence that is alone guesses ahead, where it was given what guesses. What a sequence says does
not depend on its company: sampling, stops and limits are the loop's. It does not know who asked,
threads, or where the weights lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from localrt.engine.answer import Answer
from localrt.engine.base import Check, EngineInfo, EngineSession, Logits
from localrt.engine.loop import common_prefix
from localrt.engine.request import Request
from localrt.engine.speculation import Stepper
from localrt.engine.types import Chunk, FinishReason, Metrics
from localrt.errors import LocalrtError, MemoryBudgetError
from localrt.models.tokenizers.base import Tokenizer
from localrt.quant.ops.kv_growth import grown_capacity

__all__ = ["MOST_SEQUENCES", "BatchEngine", "Items", "Job", "Schedule", "Terms", "Waiting"]

# More rows of a decode pass gain little: from here on products are bound by arithmetic.
MOST_SEQUENCES = 64

Owner = TypeVar("Owner")
# What a pass has brought a sequence: chunks, or what went wrong with it alone.
Items: TypeAlias = Sequence[Chunk | LocalrtError]


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


class Job(Generic[Owner]):
    """One prompt on its way: the tokens it wants computed next, and what it has said.

    ``owner`` is whoever its chunks are for; ``capacity`` the tokens that its cache may have to
    hold.
    """

    def __init__(self, owner: Owner, request: Request, ctx: int) -> None:
        self.owner = owner
        self.request = request
        room = ctx - len(request.prompt)
        self._limit = room if request.max_tokens is None else min(request.max_tokens, room)
        self.capacity = min(ctx, grown_capacity(len(request.prompt) + self._limit))
        self.pending: Sequence[int] = ()
        self.done = False
        self._answer: Answer | None = None
        self._held = 0
        self._speculation = request.speculation
        self._steps: Stepper | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and what has been said."""
        said = None if self._answer is None else self._answer.generated
        return [*self.request.prompt, *said] if said else self.request.prompt

    @property
    def length(self) -> int:
        """The number of ``tokens``."""
        said = 0 if self._answer is None else len(self._answer.generated)
        return len(self.request.prompt) + said

    def start(self, session: EngineSession, tokenizer: Tokenizer | None) -> None:
        """Begin on ``session``, or go on there; what it holds of prompt and answer is kept."""
        tokens = self.tokens
        # The last token runs in any case: its logits are what we need.
        held = min(common_prefix(session.tokens, tokens), len(tokens) - 1)
        session.trim(held)
        self.pending = tokens[held:]
        if self._answer is None:
            self._answer, self._held = Answer(self.request, session, tokenizer), held

    def guessing(self, session: EngineSession) -> Stepper | None:
        """What guesses ahead on ``session`` while it is alone; None where nothing does."""
        if self._steps is None and self._speculation is not None and len(self.pending) == 1:
            assert self._answer is not None, "it has started"
            left = self._limit - len(self._answer.generated)
            self._steps = self._speculation.start(session, self.tokens[:-1], left)
            self._answer.meter.steps = self._steps
            if self._steps is None:
                self._speculation = None
        return self._steps

    def guessed(self, steps: Stepper, check: Check) -> Items:
        """What follows from its pending token, and from guesses behind it."""
        assert self._answer is not None, "it has started"
        (token,) = self.pending
        left = self._limit - len(self._answer.generated)
        return self.accept(steps.advance(token, left, check))

    def guess_no_more(self) -> None:
        """It is to be computed token by token."""
        self._speculation = None

    def settle(self) -> None:
        """Nothing guesses for it any more; its session keeps what was accepted."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.finish()

    def accept(self, logits: Logits) -> Items:
        """What follows from the logits (vocab,) after all pending tokens."""
        try:
            return self._accept(logits)
        except LocalrtError as error:
            return self.fail(error)

    def fail(self, error: LocalrtError) -> Items:
        """It ends here, with ``error`` in place of a last chunk."""
        self.done = True
        return [error]

    def _accept(self, logits: Logits) -> list[Chunk]:
        answer = self._answer
        assert answer is not None, "it has started"
        if not answer.generated:
            answer.meter.prefilled(self._held)
        chunk = answer.accept(logits)
        if chunk is None:
            return [self.end("stop")]
        self.pending = chunk.token_ids
        self.done = chunk.finish_reason is not None
        alone = self.done or len(answer.generated) < self._limit
        return [chunk] if alone else [chunk, self.end("length")]

    def end(self, reason: FinishReason) -> Chunk:
        """The last chunk, with the text that was held back."""
        self.done = True
        if self._answer is not None:
            return self._answer.end(reason)
        request = self.request
        metrics = Metrics(prompt_tokens=len(request.prompt), exactness=request.exactness)
        return Chunk("", (), metrics, reason)


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
                job.settle()
            return []
        ((job, session),) = self._live
        steps = job.guessing(session)
        if steps is None:
            return []
        passes = steps.passes
        try:
            return [(job, job.guessed(steps, self._check))]
        except MemoryBudgetError:  # a pass without guesses needs less
            job.settle()
            job.guess_no_more()
            return []
        finally:
            self.passes += steps.passes - passes

    def _advance(self) -> list[tuple[Job[Owner], Items]]:
        """Compute one pass; what follows for the sequences that have no more pending tokens."""
        parts = self._parts()
        if not parts:
            return []
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

    def _parts(self) -> list[tuple[Job[Owner], EngineSession, Sequence[int]]]:
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
