"""A prompt as the beginning of what is answered: its text, and the log-probabilities of its tokens.

By these programs that evaluate models score texts. They are computed apart from the running batch,
as ``Model.logits`` does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from math import nan

from localrt.api import Model
from localrt.engine.sampling import log_probabilities
from localrt.engine.types import Chunk, Metrics, TokenLogprob
from localrt.errors import CancelledError, OptionError

__all__ = ["echo_of"]


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
