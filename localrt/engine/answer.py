"""One answer as it grows: sampling, detokenization and stop strings, times and counts.

A single generation and a batch share it, so that both give the same answers. It does not compute
logits, and does not know where they come from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import LocalrtError
from localrt.engine.protocol import EngineSession, Logits
from localrt.engine.request import AnswerParser, Constraint, Request
from localrt.engine.sampling import (
    Dry,
    adjust_logits,
    constrained,
    distribution,
    draw,
    ends_middle,
    log_probabilities,
)
from localrt.engine.speculation import Drafting
from localrt.engine.stopping import LineMatcher, ThinkingState
from localrt.engine.types import Chunk, FinishReason, Metrics, TokenLogprob, ToolCall
from localrt.models.tokenizers.base import Tokenizer
from localrt.offload.memory import peak_rss
from localrt.quant.ops.protocol import is_best

_CLOSE = "</think>"  # ends the thinking in a parser's text


class AnswerState:
    """The answer to a request so far: ``generated`` has its tokens, ``meter`` its times.

    ``shared``: other answers may share its passes.
    """

    def __init__(
        self,
        request: Request,
        session: EngineSession,
        tokenizer: Tokenizer | None,
        *,
        shared: bool = False,
    ) -> None:
        self.generated: list[int] = []
        self.meter = Meter(request, session, shared=shared)
        self._request = request
        self._tokenizer = tokenizer
        parser = None if request.parser is None or tokenizer is None else request.parser()
        self._parser = parser
        self._text = _Text(tokenizer, request, parser)
        self._thinking = ThinkingState(request.thinking_limit, inside=self._inside)
        self._end_logprob: TokenLogprob | None = None
        self._rng = Random(request.sampling.seed)  # importing numpy.random would take 7 MB
        dry = request.sampling.avoids_repetition
        self._dry = Dry(request.sampling, request.prompt, tokenizer) if dry else None
        self._constraint = None if request.constraint is None else request.constraint()
        asked = len(request.prompt) - request.begun
        self._prompt, self._written = request.prompt[:asked], list(request.prompt[asked:])
        self._misfit: LocalrtError | None = None
        head = "".join(map(self._replayed, self._written))
        begun: dict[str, Any] = {"begun": tuple(self._written)} if self._written else {}
        self._head = head, begun  # of the next chunk
        self._thought = self._thinking.tokens

    def _take_head(self) -> tuple[str, dict[str, Any]]:
        """Return what the next chunk has besides its own: a continued answer's text and info."""
        head, self._head = self._head, ("", {})
        return head

    def _replayed(self, token: int) -> str:
        """Return the text of a token of the answer that is continued; what chooses the next tokens
        is then as it was after it.
        """
        bound = None if self._thinking.free else self._constraint
        forced = self._thinking.take(instead=token)
        if forced is None:
            sampling = self._request.sampling
            for _ in range(sampling.excludes_top + (not sampling.greedy)):
                self._rng.random()
        piece = self._text.push(token)
        self._thinking.follow(self._inside, forced=forced is not None)
        if bound is not None:
            try:
                bound.accept(token)
            except LocalrtError as error:  # of another schema; told when it is its turn
                self._misfit = self._misfit or error
        return piece

    def accept(self, logits: npt.NDArray[Any]) -> Chunk | None:
        """Choose a token from ``logits`` (vocab,), or ``BEST`` if ``Request.best_only``; return its
        chunk, or None if the model ends here.

        The chunk has a finish reason if its text completed a stop string, or if the constraint
        allows no further token.

        Raises:
            LocalrtError: the logits are NaN, or no token fits the constraint, or what is continued
                does not.
        """
        if self._misfit is not None:
            raise self._misfit
        request = self._request
        values = logits["value"] if is_best(logits) else logits
        if not np.isfinite(values.max()):
            raise LocalrtError("the model produced NaN logits: its files may be damaged")
        bound = None if self._thinking.free else self._constraint
        forced = self._thinking.take()
        if request.fills_gap and bound is None and ends_middle(logits, request.eos_ids):
            return None
        token, logprob = self._choose(logits, bound, forced)
        if token in request.eos_ids and forced is None:
            if self._constraint is None or bound is not None or not self._thinking.can_close:
                self._end_logprob = next(iter(logprob), None)
                return None
            forced = self._thinking.close()  # the answer itself comes later
            token, logprob = self._choose(logits, bound, forced)
        self.generated.append(token)
        self._written.append(token)
        if self._dry is not None:
            self._dry.push(token)
        head, info = self._take_head()
        piece = head + self._text.push(token)
        self._thinking.follow(self._inside, forced=forced is not None)
        self.meter.token(thinking=self._thinking.tokens - self._thought)
        stopped = self._text.stopped
        if bound is not None:
            bound.accept(token)
            if bound.done and not stopped:
                piece += self._text.flush()
                stopped = True
        metrics = self.meter.snapshot(final=stopped)
        if not stopped:
            return Chunk(piece, (token,), metrics, None, logprob, info=info)
        matched = self._text.matched
        reason = self._reason("stop")
        return Chunk(
            piece, (token,), metrics, reason, logprob, self._calls, info, stop_string=matched
        )

    def end(self, reason: FinishReason) -> Chunk:
        """Return the last chunk, with the text that was held back."""
        head, info = self._take_head()
        rest = head + self._text.flush(cut=reason != "stop")
        if self._text.stopped:
            reason = "stop"
        metrics = self.meter.snapshot(final=True)
        matched = self._text.matched
        reason = self._reason(reason)
        return Chunk(
            rest,
            (),
            metrics,
            reason,
            tool_calls=self._calls,
            info=info,
            stop_string=matched,
            end_logprob=self._end_logprob,
        )

    def ahead(self, left: int) -> int:
        """Of ``left`` tokens to come, return how many may be drafted, plus the one after them."""
        return self._thinking.ahead(left)

    @property
    def _inside(self) -> bool:
        """Whether the text so far ends within the model's thinking."""
        return self._parser is not None and self._parser.thinking

    @property
    def _calls(self) -> tuple[ToolCall, ...]:
        return () if self._parser is None else self._parser.calls

    def _reason(self, reason: FinishReason) -> FinishReason:
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _choose(
        self, logits: Logits, bound: Constraint | None, forced: int | None
    ) -> tuple[int, tuple[TokenLogprob, ...]]:
        """Return the next token, or ``forced`` if given, with its log-probability if wanted."""
        request, tokenizer = self._request, self._tokenizer
        token = self._sample(logits, bound) if forced is None else forced
        if request.logprobs is None:
            return token, ()

        def spelled(token_id: int) -> str:
            return tokenizer.token_text(token_id) if tokenizer is not None else ""

        value, best = log_probabilities(logits, token, request.logprobs)
        top = tuple((i, spelled(i), p) for i, p in best)
        return token, (TokenLogprob(token, spelled(token), value, top),)

    def _sample(self, logits: Logits, bound: Constraint | None) -> int:
        request, sampling = self._request, self._request.sampling
        adjusted = adjust_logits(logits, self._prompt, self._written, sampling)
        if self._dry is not None:
            adjusted = self._dry.applied(adjusted)
        # Each chosen token takes one random number, a draft token none: drafts change nothing.
        chance = self._rng.random() if sampling.excludes_top else 1.0
        if bound is None:
            # Thinking cannot end the answer that follows it.
            if self._constraint is not None and not self._thinking.can_close:
                adjusted = adjusted.copy()
                adjusted[[token for token in request.eos_ids if token < len(adjusted)]] = -np.inf
            candidates = distribution(adjusted, sampling, chance)
        else:
            ids = _allowed_ids(bound, request.eos_ids, adjusted)
            ends = bound.ends_early and bound.may_end and int(adjusted.argmax()) not in ids
            if ends and request.eos_ids:
                return min(request.eos_ids)
            candidates = constrained(adjusted, ids, sampling, chance)
        greedy = sampling.greedy
        return int(candidates.tokens[0]) if greedy else draw(candidates, self._rng.random())


class _Text:
    """Turns tokens into visible text."""

    def __init__(
        self, tokenizer: Tokenizer | None, request: Request, parser: AnswerParser | None
    ) -> None:
        self._matcher = StopMatcher(request.stop)
        self._lines = None if request.lines is None else LineMatcher(request.lines)
        self._parser = parser
        self._begun = True  # False until text follows a thought and its white space
        self._hidden: frozenset[int] = frozenset()
        if tokenizer is None:
            self._detokenizer = None
        elif parser is None:
            self._detokenizer = tokenizer.detokenizer()
        else:
            self._detokenizer = tokenizer.detokenizer(skip_special=False)
            read = map(tokenizer.token_id, parser.markers)
            self._hidden = tokenizer.special_ids.difference(t for t in read if t is not None)

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped or (self._lines is not None and self._lines.stopped)

    @property
    def matched(self) -> str | None:
        return self._matcher.matched

    def push(self, token: int) -> str:
        if self._detokenizer is None or token in self._hidden:
            return ""
        piece = self._detokenizer.push(token)
        if self._parser is None:
            piece = self._matcher.push(piece)
        else:
            piece = self._matched(self._parser.thinking, self._parser.push(piece))
        if self._lines is None:
            return piece
        shown = self._lines.push(piece)
        return shown + self._lines.flush() if self._matcher.stopped else shown

    def flush(self, *, cut: bool = False) -> str:
        if self._detokenizer is None:
            return ""
        # What is left of an answer that was cut is half a character.
        rest = "" if cut else self._detokenizer.flush()
        if self._parser is None:
            rest = self._matcher.push(rest)
        else:
            thought = self._parser.thinking
            rest = self._matched(thought, self._parser.push(rest) + self._parser.flush(cut=cut))
        rest += self._matcher.flush()
        return rest if self._lines is None else self._lines.push(rest) + self._lines.flush()

    def _matched(self, thought: bool, piece: str) -> str:
        """Return the part of ``piece`` before a stop string; thoughts, and the white space after
        them, have none. ``thought``: the piece begins within one.
        """
        assert self._parser is not None
        if self._parser.thinking:
            self._begun = False
            return self._matcher.flush() + piece
        thoughts, closed, answer = piece.rpartition(_CLOSE) if thought else ("", "", piece)
        if not self._begun:
            start = answer.lstrip()
            closed += answer[: len(answer) - len(start)]
            answer, self._begun = start, bool(start)
        return thoughts + closed + self._matcher.push(answer)


class StopMatcher:
    """Takes pieces of text and returns what may be shown, never the stop string itself.

    Stop strings may span tokens: text is held back only while it may still become one. ``matched``
    is the stop string that was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found."""
        return self.matched is not None

    def push(self, piece: str) -> str:
        """Return the text that cannot begin a stop string; set ``matched`` at the first match."""
        if not self._stops or self.stopped:
            return "" if self.stopped else piece
        self._held += piece
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Return the text held back, when the text ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _allowed_ids(
    constraint: Constraint, ends: frozenset[int], logits: Logits
) -> npt.NDArray[np.intp]:
    """Return the ids allowed for ``logits`` (V,): ``ends`` only where the answer may end.

    Raises:
        LocalrtError: no token is allowed, because of the vocabulary or a bias.
    """
    allowed = np.zeros(len(logits), np.bool_)
    known = constraint.allowed()[: len(logits)]
    allowed[: len(known)] = known
    allowed[[token for token in ends if token < len(logits)]] = constraint.may_end
    allowed &= logits > -np.inf
    ids = np.flatnonzero(allowed)
    if not len(ids):
        raise LocalrtError("no token of the model fits json_schema, regex or grammar here")
    return ids


class Meter:
    """Times and counts of one answer."""

    def __init__(self, request: Request, session: EngineSession, *, shared: bool = False) -> None:
        self._session = session
        self._start = time.perf_counter()
        self._first: float | None = None
        self.steps: Drafting | None = None
        self.cached = 0
        self._before = self._decoding = session.counts()
        # Made before the run that it is compared with; useless if passes are shared.
        self._forecast = None if shared else session.forecast()
        self._metrics = Metrics(prompt_tokens=len(request.prompt), exactness=request.exactness)

    def prefilled(self, cached: int) -> None:
        """The prompt has been computed, except the ``cached`` tokens that the session held."""
        m = self._metrics
        m.cached_tokens = self.cached = cached
        elapsed = time.perf_counter() - self._start
        m.prefill_tok_s = (m.prompt_tokens - cached) / elapsed if elapsed > 0 else None

    def token(self, *, thinking: int = 0) -> None:
        """Count one more token; ``thinking`` is the number of thought tokens so far."""
        m, now = self._metrics, time.perf_counter()
        m.completion_tokens += 1
        m.thinking_tokens = thinking
        if self._first is None:
            self._first, m.ttft_s = now, now - self._start
            self._decoding = self._session.counts()
        else:
            if self.steps is not None and self.steps.passes:
                m.accepted_per_pass = self.steps.emitted / self.steps.passes
            m.tpot_s = (now - self._first) / (m.completion_tokens - 1)
            m.decode_tok_s = 1 / m.tpot_s if m.tpot_s > 0 else None

    def snapshot(self, *, final: bool = False) -> Metrics:
        """Return a copy of the metrics so far; ``final`` adds those that are costly to find."""
        if self.steps is not None:
            self._metrics.speculation = self.steps.reason
            self._metrics.accepted_by_source = self.steps.acceptance()
        if final:
            self._metrics.peak_ram_bytes = peak_rss()
            self._pipeline()
        return replace(self._metrics)

    def _pipeline(self) -> None:
        """Add the metrics of streaming; efficiency is measured from the first token on."""
        m, now, counts = self._metrics, time.perf_counter(), self._session.counts()
        forecast = self._forecast
        if forecast is not None:
            m.predicted_tok_s, m.ceiling_tok_s = forecast.tok_s, forecast.ceiling_tok_s
        if counts is None or self._before is None or self._decoding is None:
            return
        whole, decoded = counts.since(self._before), counts.since(self._decoding)
        m.ssd_read_bytes, m.link_bytes = whole.ssd_read_bytes, whole.link_bytes
        m.memory = counts.memory_note or None
        if decoded.expert_uses:
            m.expert_hit_rate = decoded.expert_hits / decoded.expert_uses
        if self._first is not None and m.completion_tokens > 1:
            busy = max(decoded.busy_s.values(), default=0.0)
            m.pipeline_efficiency = min(1.0, busy / (now - self._first))
