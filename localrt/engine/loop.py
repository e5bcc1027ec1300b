"""The generation loop: prompt in, chunks out, on any engine's session.

It reuses the longest prefix that the session already holds, samples, finds stops and measures. It
does not know templates, files or where a session came from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from localrt.engine.base import EngineSession, Logits
from localrt.engine.sampling import (
    Sampling,
    adjust_logits,
    distribution,
    draw,
    log_probabilities,
)
from localrt.engine.speculation import Speculation, Stepper
from localrt.engine.stops import StopMatcher
from localrt.engine.types import (
    Chunk,
    FinishReason,
    Metrics,
    Progress,
    ProgressCallback,
    TokenLogprob,
)
from localrt.errors import CancelledError, ContextOverflowError, OptionError
from localrt.models.tokenizers.base import Detokenizer, Tokenizer
from localrt.offload.memory import peak_rss

__all__ = ["Request", "common_prefix", "generate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation, fully spelled out. ``max_tokens=None`` runs to the end of the context."""

    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # alternatives per token; None records nothing
    exactness: str | None = None
    speculation: Speculation | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    on_progress: ProgressCallback | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differ[0]) if len(differ) else size


def generate(
    session: EngineSession, tokenizer: Tokenizer | None, request: Request
) -> Iterator[Chunk]:
    """Yield one chunk per token and a last one with the finish reason.

    Cancelling (``request.cancel``) ends with finish reason ``"cancelled"`` within one layer's time.
    The session keeps what was computed, for the next request to reuse.

    Raises:
        ContextOverflowError: the prompt leaves no room for one token.
    """
    prompt = request.prompt
    if not prompt:
        raise OptionError("the prompt is empty: there is nothing to continue")
    if len(prompt) >= session.capacity:
        raise ContextOverflowError(
            f"the prompt has {len(prompt)} tokens and the context holds {session.capacity}: "
            "shorten it, raise --ctx, or use overflow='drop_oldest'"
        )
    return _run(session, tokenizer, request)


def _run(session: EngineSession, tokenizer: Tokenizer | None, request: Request) -> Iterator[Chunk]:
    meter = _Meter(request, session)
    text = _Text(tokenizer, request.stop)
    rng = np.random.default_rng(request.sampling.seed)
    room = session.capacity - len(request.prompt)
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    generated: list[int] = []
    speculation = request.speculation
    steps = None if speculation is None else speculation.start(session, request.prompt, limit)
    meter.steps = steps

    def check() -> None:
        if request.cancel.is_set():
            raise CancelledError("the generation was cancelled")

    reason: FinishReason = "length"
    try:
        logits = _prefill(session, request, meter, check)
        if steps is not None:
            steps.prefilled(len(request.prompt) - meter.cached)
        while len(generated) < limit:
            check()
            token, logprob = _choose(logits, generated, request, rng, tokenizer)
            if token in request.eos_ids:
                reason = "stop"
                break
            generated.append(token)
            piece = text.push(token)
            meter.token()
            if text.stopped:
                yield Chunk(piece, (token,), meter.snapshot(final=True), "stop", logprob)
                return
            yield Chunk(piece, (token,), meter.snapshot(), None, logprob)
            left = limit - len(generated)
            if left and steps is not None:
                logits = steps.advance(token, left, check)
            elif left:
                logits = session.extend([token], check=check)
    except CancelledError:
        reason = "cancelled"
    finally:
        if steps is not None:
            steps.finish()
    rest = text.flush()
    if text.stopped:
        reason = "stop"
    yield Chunk(rest, (), meter.snapshot(final=True), reason)


def _prefill(
    session: EngineSession, request: Request, meter: _Meter, check: Callable[[], None]
) -> Logits:
    prompt = request.prompt
    # The last token runs again even when all are held: its logits are what we need.
    held = min(common_prefix(session.tokens, prompt), len(prompt) - 1)
    session.trim(held)
    total = len(prompt) - held

    def report(done: int) -> None:
        if request.on_progress is not None:
            request.on_progress(Progress("prefill", done, total, "tokens"))

    logits = session.extend(prompt[held:], check=check, on_progress=report)
    meter.prefilled(held)
    return logits


def _choose(
    logits: Logits,
    generated: Sequence[int],
    request: Request,
    rng: np.random.Generator,
    tokenizer: Tokenizer | None,
) -> tuple[int, tuple[TokenLogprob, ...]]:
    sampling = request.sampling
    adjusted = adjust_logits(logits, request.prompt, generated, sampling)
    candidates = distribution(adjusted, sampling)
    token = int(candidates.tokens[0]) if sampling.greedy else draw(candidates, rng.random())
    if request.logprobs is None:
        return token, ()

    def spelled(token_id: int) -> str:
        return tokenizer.token_text(token_id) if tokenizer is not None else ""

    value, best = log_probabilities(logits, token, request.logprobs)
    top = tuple((i, spelled(i), p) for i, p in best)
    return token, (TokenLogprob(token, spelled(token), value, top),)


class _Text:
    """Tokens to text that may be shown."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._detokenizer: Detokenizer | None = tokenizer.detokenizer() if tokenizer else None
        self._matcher = StopMatcher(stops)

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    def push(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        return self._matcher.push(self._detokenizer.push(token))

    def flush(self) -> str:
        if self._detokenizer is None:
            return ""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()


class _Meter:
    """Times and counts. A snapshot is the caller's own."""

    def __init__(self, request: Request, session: EngineSession) -> None:
        self._session = session
        self._start = self._now()
        self._first: float | None = None
        self.steps: Stepper | None = None
        self.cached = 0
        self._before = self._decoding = session.counts()
        self._forecast = session.forecast  # made before what it is compared with
        self._metrics = Metrics(prompt_tokens=len(request.prompt), exactness=request.exactness)

    def _now(self) -> float:
        """Seconds on the clock that the session runs on: a virtual card has its own."""
        counts = self._session.counts()
        return time.perf_counter() if counts is None else counts.clock_s

    def prefilled(self, cached: int) -> None:
        m = self._metrics
        m.cached_tokens = self.cached = cached
        elapsed = self._now() - self._start
        m.prefill_tok_s = (m.prompt_tokens - cached) / elapsed if elapsed > 0 else None

    def token(self) -> None:
        m, now = self._metrics, self._now()
        m.completion_tokens += 1
        if self._first is None:
            self._first, m.ttft_s = now, now - self._start
            self._decoding = self._session.counts()
        else:
            self._guessing()
            m.tpot_s = (now - self._first) / (m.completion_tokens - 1)
            m.decode_tok_s = 1 / m.tpot_s if m.tpot_s > 0 else None

    def _guessing(self) -> None:
        m, steps = self._metrics, self.steps
        if steps is not None and steps.passes:
            m.accepted_per_pass = steps.emitted / steps.passes

    def snapshot(self, *, final: bool = False) -> Metrics:
        if self.steps is not None:
            self._metrics.speculation = self.steps.reason
            self._metrics.accepted_by_source = self.steps.acceptance()
        if final:
            self._metrics.peak_ram_bytes = peak_rss()
            self._pipeline()
        return replace(self._metrics)

    def _pipeline(self) -> None:
        """What streaming cost; efficiency is that of decoding, from the first token on."""
        m, now, counts = self._metrics, self._now(), self._session.counts()
        forecast = self._forecast
        if forecast is not None:
            m.predicted_tok_s, m.ceiling_tok_s = forecast.tok_s, forecast.ceiling_tok_s
            m.simulated = forecast.simulated
        if counts is None or self._before is None or self._decoding is None:
            return
        m.ssd_read_bytes = counts.ssd_read_bytes - self._before.ssd_read_bytes
        m.link_bytes = counts.link_bytes - self._before.link_bytes
        if self._first is not None and m.completion_tokens > 1:
            busy = (
                seconds - self._decoding.busy_s.get(resource, 0.0)
                for resource, seconds in counts.busy_s.items()
            )
            m.pipeline_efficiency = min(1.0, max(busy, default=0.0) / (now - self._first))
