"""A prompt as the beginning of what is answered: its text, and the log-probabilities of its tokens.

By these programs that evaluate models score texts. They are computed apart from the running batch,
as ``Model.logits`` does.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from math import nan

from localrt.api import Model
from localrt.engine.sampling import log_probabilities
from localrt.engine.types import Chunk, Metrics, TokenLogprob
from localrt.errors import CancelledError, OptionError
from localrt.live import AsyncAnswer

__all__ = ["EchoedAnswer", "echo_of"]


class EchoedAnswer(AsyncIterator[Chunk]):
    """``echo``, and then the chunks of ``answer``; without an answer the echo is all."""

    def __init__(self, echo: Chunk, answer: AsyncAnswer | None) -> None:
        self._answer = answer
        self._first: Chunk | None = echo if answer else replace(echo, finish_reason="length")

    async def __anext__(self) -> Chunk:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._answer is None:
            raise StopAsyncIteration
        return await anext(self._answer)

    @property
    def over(self) -> bool:
        """Whether all has been read."""
        return self._first is None and (self._answer is None or self._answer.over)

    def cancel(self) -> None:
        """See ``AsyncAnswer``."""
        if self._answer is not None:
            self._answer.cancel()


def echo_of(
    model: Model,
    prompt: str | Sequence[int],
    *,
    shown: bool,
    top: int | None,
    adapter: str | None,
    cancel: threading.Event,
) -> Chunk:
    """``prompt`` as a chunk, without text unless ``shown``; with ``top`` alternatives for each of
    its tokens, None without log-probabilities.

    Raises:
        LocalrtError: it cannot be read, or is longer than the context.
    """
    ids = model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise OptionError("the prompt is empty: there is nothing to read")
    text = prompt if isinstance(prompt, str) else model.detokenize(ids, skip_special=False)
    scores = () if top is None else tuple(_scores(model, ids, top, adapter, cancel))
    return Chunk(text if shown else "", (), Metrics(prompt_tokens=len(ids)), logprobs=scores)


def _scores(
    model: Model, ids: Sequence[int], top: int, adapter: str | None, cancel: threading.Event
) -> Iterator[TokenLogprob]:
    """Of every token; nothing stands before the first, which has no number."""
    spelled = model.tokenizer.token_text
    if ids:
        yield TokenLogprob(ids[0], spelled(ids[0]), nan)
    at = 1
    for rows in model.logits(ids[:-1], adapter=adapter) if len(ids) > 1 else ():  # (n, vocab)
        if cancel.is_set():
            raise CancelledError("the request was cancelled")
        for row, token in zip(rows, ids[at:], strict=False):
            value, best = log_probabilities(row, token, top)
            alternatives = tuple((one, spelled(one), logprob) for one, logprob in best)
            yield TokenLogprob(token, spelled(token), value, alternatives)
        at += len(rows)
