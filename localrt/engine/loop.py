"""The generation loop: prompt in, chunks out, on any engine's session.

It reuses the longest prefix that the session already holds, samples, finds stops and measures. It
does not know templates, files or where a session came from.
"""

from __future__ import annotations

from collections.abc import Iterator

from localrt.common.errors import CancelledError
from localrt.common.progress import Progress
from localrt.engine.answer import Answer, Meter
from localrt.engine.protocol import EngineSession, Logits
from localrt.engine.request import Request
from localrt.engine.types import Chunk, FinishReason
from localrt.models.prefix import common_prefix
from localrt.models.tokenizers.base import Tokenizer
from localrt.quant.ops.protocol import Check


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
    session.use(request.mix)
    return _run(session, tokenizer, request)


def _run(session: EngineSession, tokenizer: Tokenizer | None, request: Request) -> Iterator[Chunk]:
    answer = Answer(request, session, tokenizer)
    if request.restore is not None:
        request.restore(session, request.prompt)
    room = session.capacity - len(request.prompt)
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    speculation = request.speculation
    steps = None if speculation is None else speculation.start(session, request.prompt, limit)
    answer.meter.steps = steps

    def check() -> None:
        if request.cancel.is_set():
            raise CancelledError("the generation was cancelled")

    reason: FinishReason = "length"
    try:
        logits = _prefill(session, request, answer.meter, check)
        if steps is not None:
            steps.prefilled(len(request.prompt) - answer.meter.cached)
        while (left := limit - len(answer.generated)) > 0:
            check()
            chunk = answer.accept(logits)
            if chunk is None:
                reason = "stop"
                break
            yield chunk
            if chunk.finish_reason is not None:
                return
            (token,) = chunk.token_ids
            del logits  # a row of the tree pass's array: free it before the next pass
            if left > 1 and steps is not None:
                logits = steps.advance(token, answer.ahead(left - 1), check)
            elif left > 1:
                logits = session.extend([token], check=check)
    except CancelledError:
        reason = "cancelled"
    finally:
        if steps is not None:
            steps.finish()
    yield answer.end(reason)


def _prefill(session: EngineSession, request: Request, meter: Meter, check: Check) -> Logits:
    prompt = request.prompt
    # The last token runs again even if the session holds all tokens: its logits are needed.
    held = session.trim(min(common_prefix(session.tokens, prompt), len(prompt) - 1))
    total = len(prompt) - held

    def report(done: int) -> None:
        if request.on_progress is not None:
            request.on_progress(Progress("prefill", done, total, "tokens"))

    done = request.repeated if held < request.repeated < len(prompt) else held
    if done > held:
        session.extend(prompt[held:done], check=check, on_progress=report)
    logits = session.extend(
        prompt[done:], check=check, on_progress=lambda count: report(done - held + count)
    )
    meter.prefilled(held)
    return logits
