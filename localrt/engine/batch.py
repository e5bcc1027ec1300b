"""Many prompts at once: each pass over the weights serves a block of sequences.

A pass takes one row of every sequence that is answering and fills up with rows of prompts, so that
weights which are streamed are read once for all (FlexGen's block schedule, Sheng et al. 2023, with
prompts joining as others finish, as in Orca, Yu et al. 2022, and Sarathi, Agrawal et al. 2023).
What a sequence says does not depend on its company: sampling, stops and limits are the loop's. It
does not know chat templates, files, or where the weights lie.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from localrt.engine.answer import Answer
from localrt.engine.base import Check, Engine, EngineInfo, EngineSession, Logits
from localrt.engine.loop import common_prefix, generate
from localrt.engine.request import Request
from localrt.engine.types import Chunk, FinishReason, Metrics, Progress, ProgressCallback
from localrt.errors import (
    CancelledError,
    ContextOverflowError,
    LocalrtError,
    MemoryBudgetError,
    OptionError,
)
from localrt.models.tokenizers.base import Tokenizer
from localrt.offload.budget import format_bytes
from localrt.offload.process_memory import current_rss, ram_budget
from localrt.quant.ops.kv_growth import grown_capacity

__all__ = ["BatchEngine", "BatchLimits", "Item", "check_request", "generate_batch", "kv_room"]

# A request's number, with its next chunk or what went wrong with it alone.
Item: TypeAlias = tuple[int, Chunk | LocalrtError]

# More rows of a decode pass gain little: from here on products are bound by arithmetic.
MOST_SEQUENCES = 64
# The rest is for activations, and for what else the machine does meanwhile.
_KV_SHARE = 0.8


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How many sequences may be on their way at the same time.

    ``ctx`` is the longest sequence, ``room`` the bytes that their KV caches may take. ``size`` is
    the caller's own number of sequences; None takes up to 64, as many as ``room`` holds. A single
    sequence always runs.
    """

    ctx: int
    room: int
    size: int | None = None

    def __post_init__(self) -> None:
        size = self.size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise OptionError(f"batch_size must be an integer of at least 1, is {size!r}")


def kv_room(engine: Engine, *, ram: int | None, gpu_memory: int | None) -> int:
    """Bytes that KV caches may still take within the budgets, where ``engine`` keeps them.

    Weights that would be streamed instead count as room: a pass reads them once for all sequences.
    """
    if not isinstance(engine, BatchEngine):
        return 0
    free = engine.free_memory()
    if free is not None:
        budget = free if gpu_memory is None else gpu_memory - engine.info.weight_bytes
        room = min(free, budget)
    else:
        room = ram_budget(ram) - current_rss() + engine.reclaimable()
    return max(0, int(room * _KV_SHARE))


def check_request(request: Request, *, ctx: int, vocab_size: int) -> None:
    """What a prompt must be, checked before any work.

    Raises:
        ContextOverflowError: it leaves no room for one token.
        OptionError: it is empty, or has an id outside the vocabulary.
    """
    prompt = request.prompt
    if not prompt:
        raise OptionError("the prompt is empty: there is nothing to continue")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise OptionError(f"token ids must be from 0 to {vocab_size - 1}")
    if len(prompt) >= ctx:
        raise ContextOverflowError(
            f"the prompt has {len(prompt)} tokens and the context holds {ctx}: shorten it, or "
            "raise --ctx"
        )


def generate_batch(
    engine: Engine,
    tokenizer: Tokenizer | None,
    requests: Sequence[tuple[int, Request]],
    limits: BatchLimits,
    *,
    cancel: threading.Event,
    on_progress: ProgressCallback | None = None,
) -> Generator[Item, None, None]:
    """The chunks of every request, each with its request's number, as they come.

    ``requests`` have passed ``check_request``. Those waiting start in order, as soon as one on its
    way has finished. What fails one sequence is its last item; what fails a pass is raised. An
    engine that cannot join sequences runs one after another. ``on_progress`` counts finished
    prompts, with the tokens so far in ``detail``, after every pass.

    Raises:
        MemoryBudgetError: the caches of ``limits.size`` sequences do not fit.
    """
    if not isinstance(engine, BatchEngine):
        return _one_by_one(engine, tokenizer, requests, limits.ctx, on_progress)
    schedule = _Schedule(engine, tokenizer, requests, limits, cancel)
    return schedule.run(on_progress)


class _Sequence:
    """One prompt on its way: the tokens it wants computed next, and what it has said."""

    def __init__(self, index: int, request: Request, ctx: int) -> None:
        self.index = index
        self.request = request
        room = ctx - len(request.prompt)
        self._limit = room if request.max_tokens is None else min(request.max_tokens, room)
        self.capacity = min(ctx, grown_capacity(len(request.prompt) + self._limit))
        self.pending: Sequence[int] = ()
        self.done = False
        self._answer: Answer | None = None
        self._held = 0

    def start(self, session: EngineSession, tokenizer: Tokenizer | None) -> None:
        """Begin on ``session``, or go on there; what it holds of prompt and answer is kept."""
        said = [] if self._answer is None else self._answer.generated
        tokens = [*self.request.prompt, *said]
        # The last token runs in any case: its logits are what we need.
        held = min(common_prefix(session.tokens, tokens), len(tokens) - 1)
        session.trim(held)
        self.pending = tokens[held:]
        if self._answer is None:
            self._answer, self._held = Answer(self.request, session, tokenizer), held

    def accept(self, logits: Logits) -> list[Chunk]:
        """The chunks that follow from the logits (vocab,) after all pending tokens."""
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


class _Schedule:
    """Which sequences are on their way, and what the next pass computes."""

    def __init__(
        self,
        engine: BatchEngine,
        tokenizer: Tokenizer | None,
        requests: Sequence[tuple[int, Request]],
        limits: BatchLimits,
        cancel: threading.Event,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._room = limits.room
        self._cancel = cancel
        self._waiting = deque(_Sequence(*request, limits.ctx) for request in requests)
        # In the order of joining: answering sequences come before those still at their prompt.
        self._live: list[tuple[_Sequence, EngineSession]] = []
        self._left: list[EngineSession] = []  # of sequences that the last pass has finished
        self._most = min(limits.size or MOST_SEQUENCES, engine.pass_rows)
        if limits.size is not None:
            self._check_size(limits.size)

    def run(self, on_progress: ProgressCallback | None) -> Generator[Item, None, None]:
        """Pass after pass, until all have finished or all are cancelled."""
        total, finished, tokens = len(self._waiting), 0, 0
        try:
            while self._waiting or self._live:
                self._check()
                self._join()
                for sequence, items in self._advance():
                    finished += sequence.done
                    for item in items:
                        tokens += len(item.token_ids) if isinstance(item, Chunk) else 0
                        yield sequence.index, item
                self._part()
                if on_progress is not None:
                    on_progress(Progress("batch", finished, total, "prompts", f"{tokens} tokens"))
        except CancelledError:
            for sequence in [*(sequence for sequence, _ in self._live), *self._waiting]:
                if not sequence.done:
                    yield sequence.index, sequence.end("cancelled")
        finally:
            for session in [*self._left, *(session for _, session in self._live)]:
                session.close()

    def _advance(self) -> list[tuple[_Sequence, Sequence[Chunk | LocalrtError]]]:
        """Compute one pass; what follows for the sequences that have no more pending tokens."""
        room = self._engine.pass_rows
        parts: list[tuple[EngineSession, Sequence[int]]] = []
        whole: list[_Sequence] = []  # only the last part can be a piece of what is pending
        for sequence, session in self._live:
            if room == 0:
                break
            parts.append((session, sequence.pending[:room]))
            if len(sequence.pending) <= room:
                whole.append(sequence)
            room -= len(parts[-1][1])
        try:
            logits = self._engine.extend_batch(parts, wanted=range(len(whole)), check=self._check)
        except MemoryBudgetError:
            if len(self._live) == 1:
                raise
            logits = None
        if logits is None:  # not above: the error keeps caches from being freed
            self._postpone()
            return []
        for (_, tokens), (sequence, _) in zip(parts, self._live, strict=False):
            sequence.pending = sequence.pending[len(tokens) :]
        return [(seq, _accepted(seq, row)) for seq, row in zip(whole, logits, strict=True)]

    def _join(self) -> None:
        """Start waiting sequences while there is room."""
        while self._waiting and len(self._live) < self._most:
            session = self._session(self._waiting[0])
            if session is None:
                break
            sequence = self._waiting.popleft()
            self._live.append((sequence, session))
            sequence.start(session, self._tokenizer)
        for session in self._left:
            session.close()
        self._left = []

    def _session(self, sequence: _Sequence) -> EngineSession | None:
        """One left over that begins like the prompt, or a new one; None when out of room."""
        room = self._room - sum(self._cost(session.capacity) for _, session in self._live)
        shared = {
            common_prefix(session.tokens, sequence.request.prompt): session
            for session in self._left
            if session.capacity >= sequence.capacity and self._cost(session.capacity) <= room
        }
        if any(shared):
            session = shared[max(shared)]
            self._left.remove(session)
            return session
        if self._live and self._cost(sequence.capacity) > room:
            return None
        return self._engine.session(sequence.capacity)

    def _part(self) -> None:
        """Take out the sequences that have finished."""
        self._left += [session for sequence, session in self._live if sequence.done]
        self._live = [(sequence, s) for sequence, s in self._live if not sequence.done]

    def _postpone(self) -> None:
        """Memory is short: the last to join gives its cache back, and is computed again later."""
        sequence, session = self._live.pop()
        session.close()
        self._waiting.appendleft(sequence)
        self._most = len(self._live)

    def _check(self) -> None:
        if self._cancel.is_set():
            raise CancelledError("the generation was cancelled")

    def _cost(self, capacity: int) -> int:
        """Bytes of a sequence: its cache when full, and its row of logits."""
        return self._engine.kv_nbytes(capacity) + 4 * self._engine.info.vocab_size

    def _check_size(self, size: int) -> None:
        if size > self._engine.pass_rows:
            raise OptionError(f"batch_size must be at most {self._engine.pass_rows}, is {size}")
        costs = [self._cost(sequence.capacity) for sequence in self._waiting]
        costs = sorted(costs, reverse=True)[:size]
        if len(costs) > 1 and sum(costs) > self._room:
            fitting = max(1, int(np.count_nonzero(np.cumsum(costs) <= self._room)))
            raise MemoryBudgetError(
                f"{len(costs)} sequences at once need {format_bytes(sum(costs))} for their KV "
                f"caches and {format_bytes(self._room)} is available: use a batch size of "
                f"{fitting}, or a smaller max_tokens"
            )


def _accepted(sequence: _Sequence, logits: Logits) -> Sequence[Chunk | LocalrtError]:
    """The sequence's next chunks, or what went wrong with it alone."""
    try:
        return sequence.accept(logits)
    except LocalrtError as error:
        sequence.done = True
        return [error]


def _one_by_one(
    engine: Engine,
    tokenizer: Tokenizer | None,
    requests: Sequence[tuple[int, Request]],
    ctx: int,
    on_progress: ProgressCallback | None,
) -> Generator[Item, None, None]:
    tokens = 0
    with closing(engine.session(ctx)) as session:
        for finished, (index, request) in enumerate(requests, 1):
            try:
                for chunk in generate(session, tokenizer, request):
                    tokens += len(chunk.token_ids)
                    yield index, chunk
            except LocalrtError as error:
                yield index, error
            if on_progress is not None:
                detail = f"{tokens} tokens"
                on_progress(Progress("batch", finished, len(requests), "prompts", detail))
