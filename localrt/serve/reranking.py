"""How well documents answer a query, by a model that was made to say so.

A reranker judges each document with one word: the score is the probability of "yes" where the
answer is "yes" or "no", in the form of Qwen3-Reranker. For an embedding model it is the cosine of
the vectors.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from localrt.api import Model
from localrt.engine.types import Message
from localrt.errors import CancelledError, OptionError

__all__ = ["scores_of"]

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def scores_of(
    model: Model,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None,
    cancel: threading.Event,
) -> tuple[list[float], int]:
    """A score for each document, the more the better, and the tokens that were read for them.

    Raises:
        OptionError: the model is neither a reranker nor made for embeddings.
        LocalrtError: a document is too long.
    """
    pooling = model.info.pooling
    if pooling == "rank" or "rerank" in f"{model.name} {model.info.path.name}".lower():
        judged = [
            _judged(model, query, document, instruction or _INSTRUCTION, cancel)
            for document in documents
        ]
        return [score for score, _ in judged], sum(tokens for _, tokens in judged)
    if pooling:
        ids = [model.tokenize(text) for text in (query, *documents)]
        asked, *found = model.embed(ids, cancel=cancel)
        return [float(asked @ vector) for vector in found], sum(map(len, ids))
    raise OptionError(
        f"{model.name} is no reranker (its name says nothing of one) and no embedding model: "
        "serve one, such as Qwen3-Reranker"
    )


def _judged(
    model: Model, query: str, document: str, instruction: str, cancel: threading.Event
) -> tuple[float, int]:
    """The probability of "yes", and the tokens of the prompt."""
    if cancel.is_set():
        raise CancelledError("the request was cancelled")
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages: list[Message] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": asked},
    ]
    ids = model.tokenize(messages, thinking=False)
    (logits,) = next(model.logits(ids, first=len(ids) - 1))
    yes, no = (float(logits[model.tokenize(word, add_special=False)[0]]) for word in ("yes", "no"))
    return 1 / (1 + math.exp(min(no - yes, 700))), len(ids)
