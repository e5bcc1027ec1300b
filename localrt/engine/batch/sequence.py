"""One sequence, in a batch or alone: the tokens to compute next, and its answer so far.

``generate`` is the loop of a lone answer: its passes are its own, on its caller's session. No other
sequence is known here, and no memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

from localrt.common.errors import CancelledError, LocalrtError
from localrt.common.progress import Progress
from localrt.engine.answer import AnswerState
from localrt.engine.pool import copy_prefix
from localrt.engine.protocol import EngineSession, Logits
from localrt.engine.request import Request
from localrt.engine.speculation import Drafting, Proposer, Speculation, Stepper
from localrt.engine.types import Chunk, FinishReason, Metrics
from localrt.models.tokenizers.base import Tokenizer
from localrt.quant.ops.kv import common_prefix, grown_capacity
from localrt.quant.ops.protocol import Check
from localrt.speculative.acceptance import TreePass

Owner = TypeVar("Owner")
Chunks: TypeAlias = Sequence[Chunk]  # one sequence's chunks from one pass


class BatchSequence(Generic[Owner]):
    """A prompt and its answer: ``pending`` tokens are computed next; ``done`` when it has ended.

    ``owner`` receives its chunks, ``client`` is the client that requested it, ``capacity`` the most
    tokens its cache may hold. Nobody waits for the tokens of ``background`` work.
    """

    def __init__(
        self,
        owner: Owner,
        request: Request,
        ctx: int,
        client: Hashable = None,
        background: bool = False,
    ) -> None:
        self.owner = owner
        self.client = client
        self.background = background
        self.request = request
        room = ctx - len(request.prompt)
        self._limit = room if request.max_tokens is None else min(request.max_tokens, room)
        self.capacity = min(ctx, grown_capacity(len(request.prompt) + self._limit))
        self.pending: Sequence[int] = ()
        self.done = False
        self._answer: AnswerState | None = None
        self._cached = 0
        self._speculation = request.speculation
        self._drafting: Drafting | None = None  # used by the last pass

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and the answer's tokens."""
        generated = None if self._answer is None else self._answer.generated
        return [*self.request.prompt, *generated] if generated else self.request.prompt

    @property
    def length(self) -> int:
        """The number of ``tokens``."""
        generated = 0 if self._answer is None else len(self._answer.generated)
        return len(self.request.prompt) + generated

    @property
    def uncut(self) -> int:
        """The most pending tokens that a pass may take."""
        done = self.length - len(self.pending)
        ends = (end - done for end in self.request.repeated if end > done)
        return min(ends, default=len(self.pending))

    @property
    def left(self) -> int:
        """The number of tokens that the answer may still get."""
        return self._limit - (self.length - len(self.request.prompt))

    @property
    def ahead(self) -> int:
        """How many of the remaining tokens may be drafted, plus one."""
        return self.left if self._answer is None else self._answer.ahead(self.left)

    def start(
        self, session: EngineSession, tokenizer: Tokenizer | None, *, alone: bool = False
    ) -> None:
        """Start or resume on ``session``, reusing the prefix in its cache.

        ``alone``: it shares no passes, so it may draft from the start.
        """
        session.use(self.request.mix)
        session.best_only = self.request.best_only
        session.private = self.request.private
        tokens, resumes = self.tokens, self._answer is not None
        if self._answer is None:
            self._answer = AnswerState(self.request, session, tokenizer, shared=not alone)
        if self.request.restore is not None:
            self.request.restore(session, tokens)
        if alone and self._speculation is not None:
            self._speculation.prepare(session)
        cached = self._resume(session, tokens)
        if not resumes:
            self._cached = cached

    def copy(self, session: EngineSession, source: EngineSession) -> None:
        """Copy to ``session`` the prefix that ``source`` shares, if longer than its own."""
        tokens = self.tokens
        shared = min(common_prefix(source.tokens, tokens), len(tokens) - 1)
        if shared <= len(tokens) - len(self.pending):
            return
        copy_prefix(session, source, shared)
        cached = self._resume(session, tokens)
        if self._answer is not None and not self._answer.generated:
            self._cached = cached

    def _resume(self, session: EngineSession, tokens: Sequence[int]) -> int:
        """Trim ``session`` to its common prefix with ``tokens``; return the prefix's length."""
        # The last token is computed again in any case, for its logits.
        cached = session.trim(min(common_prefix(session.tokens, tokens), len(tokens) - 1))
        self.pending = tokens[cached:]
        return cached

    # -- drafting --------------------------------------------------------------------------------

    def stepper(self, session: EngineSession) -> Stepper | None:
        """Return the stepper that speculates on ``session`` while it runs alone, or None."""
        if not isinstance(self._drafting, Stepper):
            self._draft_by(lambda s: s.start(session, self.tokens[:-1], self.left))
        return self._drafting if isinstance(self._drafting, Stepper) else None

    def proposer(self, session: EngineSession) -> Proposer | None:
        """Return the proposer that drafts for ``session`` while it shares passes, or None."""
        if not isinstance(self._drafting, Proposer):
            self._draft_by(lambda s: s.start_shared(session, self.tokens[:-1]))
        return self._drafting if isinstance(self._drafting, Proposer) else None

    def _draft_by(self, start: Callable[[Speculation], Drafting | None]) -> None:
        self.settle()
        answer = self._answer
        assert answer is not None, "it has started"
        if self._speculation is not None and answer.generated and len(self.pending) == 1:
            self._drafting = answer.meter.steps = start(self._speculation)

    def stop_drafting(self) -> None:
        """Compute the answer token by token from now on."""
        self.settle()
        self._speculation = None

    def settle(self) -> None:
        """End the current drafting; the session's cache keeps only accepted tokens."""
        drafting, self._drafting = self._drafting, None
        if drafting is not None:
            drafting.finish()

    # -- passes ----------------------------------------------------------------------------------

    def compute(self, session: EngineSession, check: Check) -> TreePass:
        """Compute its pending tokens in separate passes, with draft tokens if it speculates."""
        steps = self.stepper(session)
        if steps is not None:
            (token,) = self.pending
            return steps.advance(token, self.ahead, check)
        began, unread = time.perf_counter(), len(self.pending)
        while True:
            tokens = self.pending[: self.uncut]
            logits = session.extend(tokens, check=check, on_progress=self._progress())
            self.pending = self.pending[len(tokens) :]
            if not self.pending:
                break
        if self.length == len(self.request.prompt) and self._speculation is not None:
            self._speculation.tuner.prompt(unread, time.perf_counter() - began)
        return TreePass.plain(logits)

    def _progress(self) -> Callable[[int], None] | None:
        """Return a callback that reports progress of prefill, or None."""
        report, total = self.request.on_progress, len(self.request.prompt) - self._cached
        if report is None or self.length > len(self.request.prompt):
            return None
        done = total - len(self.pending)
        return lambda count: report(Progress("prefill", done + count, total, "tokens"))

    def accept(self, computed: TreePass, check: Check = lambda: None) -> Iterator[Chunk]:
        """Sample a token after all pending ones, then more along the tree; yield their chunks.

        ``check`` is called before each token.

        Raises:
            LocalrtError: see ``AnswerState.accept``, or raised by ``check``; earlier tokens remain
            accepted.
        """
        answer, drafting = self._answer, self._drafting
        assert answer is not None, "it has started"
        if not answer.generated:
            answer.meter.prefilled(self._cached)
        if drafting is not None:
            drafting.passed()
        reason: FinishReason | None = None
        logits: Logits | None = computed.first
        try:
            while logits is not None:
                check()
                chunk = answer.accept(logits)
                if chunk is None:
                    reason = "stop"
                    break
                self.pending = chunk.token_ids
                self.done = chunk.finish_reason is not None
                yield chunk
                if self.done:
                    break
                if self.left <= 0:
                    reason = "length"
                    break
                logits = computed.after(self.pending[0])
                if logits is not None and drafting is not None:
                    drafting.accepted(computed)
        finally:
            if drafting is not None:
                drafting.verified(computed)
        if reason is not None:
            yield self.end(reason)

    def take(self, computed: TreePass) -> Chunks:
        """Return the chunks of ``accept``; an error ends the answer."""
        chunks: list[Chunk] = []
        try:
            chunks.extend(self.accept(computed))
        except LocalrtError as error:
            chunks += self.fail(error)
        return chunks

    def fail(self, error: LocalrtError) -> Chunks:
        """End the answer with ``error``."""
        self.done = True
        return [failed(error)]

    def end(self, reason: FinishReason) -> Chunk:
        """Return the last chunk, with the text that was held back."""
        self.done = True
        if self._answer is not None:
            return self._answer.end(reason)
        request = self.request
        metrics = Metrics(prompt_tokens=len(request.prompt), exactness=request.exactness)
        return Chunk("", (), metrics, reason)


def failed(error: LocalrtError) -> Chunk:
    """Return the only chunk of a prompt that cannot run."""
    return Chunk("", (), Metrics(), "error", error=error)


def generate(
    session: EngineSession, tokenizer: Tokenizer | None, request: Request
) -> Iterator[Chunk]:
    """Yield one chunk per token, and a last one with the finish reason.

    Cancelling (``request.cancel``) ends with finish reason ``"cancelled"`` within one layer's time.
    The session keeps what was computed, for the next request to reuse.

    Raises:
        ContextOverflowError: the prompt leaves no room for one token.
    """
    request.check(ctx=session.capacity)
    return _run(session, tokenizer, request)


def _run(session: EngineSession, tokenizer: Tokenizer | None, request: Request) -> Iterator[Chunk]:
    check = raising(request.cancel)
    sequence = BatchSequence(None, request, session.capacity)
    try:
        sequence.start(session, tokenizer, alone=True)
        while not sequence.done:
            # The pass has no name here, so that its logits are freed before the next one.
            yield from sequence.accept(sequence.compute(session, check), check)
    except CancelledError:
        yield sequence.end("cancelled")
    finally:
        sequence.settle()


def raising(cancel: threading.Event) -> Check:
    """The check of passes that ``cancel`` abandons."""

    def check() -> None:
        if cancel.is_set():
            raise CancelledError("the generation was cancelled")

    return check
