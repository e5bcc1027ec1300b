"""The generation loop: prompt in, chunks out, on any engine's session.

A lone answer is a batch of one: its sequence, whose passes are its own. It does not know templates,
files or where a session came from.
"""

from __future__ import annotations

from collections.abc import Iterator

from localrt.common.errors import CancelledError
from localrt.engine.batch.sequence import BatchSequence
from localrt.engine.protocol import EngineSession
from localrt.engine.request import Request
from localrt.engine.types import Chunk
from localrt.models.tokenizers.base import Tokenizer


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
    def check() -> None:
        if request.cancel.is_set():
            raise CancelledError("the generation was cancelled")

    sequence = BatchSequence(None, request, session.capacity)
    try:
        sequence.start(session, tokenizer, alone=True)
        while not sequence.done:
            # No name for the pass: its logits are freed before the next one.
            yield from sequence.accept(sequence.compute(session, check), check)
    except CancelledError:
        yield sequence.end("cancelled")
    finally:
        sequence.settle()
