"""Embeddings: hidden states of a text after the final norm, pooled over its tokens."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CancelledError, ContextOverflowError, OptionError
from localrt.common.option_names import option
from localrt.engine.options import read_options
from localrt.engine.protocol import Engine
from localrt.engine.types import Message
from localrt.quant.ops.protocol import Check
from localrt.service.core import Core
from localrt.service.requests import whole_ids
from localrt.service.status import ModelInfo

Rows: TypeAlias = npt.NDArray[np.float32]
Pooling = Literal["mean", "last", "cls"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls")
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def embed(
    core: Core,
    texts: Sequence[str | Sequence[int]],
    *,
    pooling: str,
    normalize: bool,
    cancel: threading.Event | None,
) -> Rows:
    """See ``Model.embed``."""
    if isinstance(texts, str):
        raise OptionError("embed takes a list of texts: [text] for a single one")
    if not isinstance(texts, Iterable):
        raise OptionError(f"embed takes a list of texts, not {texts!r:.80}")
    _ = core.engine.hidden_size  # an engine without hidden states raises before any other check
    if core.parts.pooling == "rank" and core.parts.mute:
        raise OptionError("the model scores pairs of texts and embeds none")
    chosen = _pooling(pooling, core.parts.pooling)
    check = partial(_check, cancel)
    tokens = [_tokens(core, text, index, check) for index, text in enumerate(texts)]
    check()
    vectors = pooled_states(core.engine, tokens, chosen, check=check)
    if not normalize:
        return vectors
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Rows = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit


def is_reranker(info: ModelInfo) -> bool:
    """Whether a model scores documents, by its files or its name."""
    named = "rerank" in f"{info.name} {info.path.name}".lower()
    return info.pooling == "rank" or (named and info.writes)


def rank(
    core: Core,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None,
    cancel: threading.Event | None,
) -> tuple[list[float], int]:
    """See ``Model.rank_counted``."""
    given = (query, *documents, instruction or "")
    if isinstance(documents, str) or not all(isinstance(one, str) for one in given):
        raise OptionError("rank takes a query and a list of documents, all of them strings")
    if not is_reranker(core.info):
        raise OptionError("the model is no reranker by its files or name: choose a cross-encoder")
    prompts = [_ranking(core, query, one, instruction or _INSTRUCTION) for one in documents]
    for index, ids in enumerate(prompts):
        _check_length(core, len(ids), f"the query with document {index}")
    check = partial(_check, cancel)
    if core.info.writes:
        likelier = [_likelier(core, ids, check) for ids in prompts]
    else:
        likelier = pooled_states(core.engine, prompts, "last", check=check)[:, 0].tolist()
    scores = [1 / (1 + math.exp(min(-one, 700))) for one in likelier]
    return scores, sum(map(len, prompts))


def _ranking(core: Core, query: str, document: str, instruction: str) -> list[int]:
    """Return what a reranker reads about a document; one that writes is asked for yes or no."""
    if not core.info.writes:
        return core.requests.tokenizer.encode_pair(query, document)
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    told: list[Message] = [{"role": "system", "content": _SYSTEM}]
    options = read_options(core.defaults, {"thinking": False})
    return core.requests.render([*told, {"role": "user", "content": asked}], options=options)


def _likelier(core: Core, ids: list[int], check: Check) -> float:
    """Return the logit of "yes" less that of "no" as an answer."""
    mix = core.adapters.mix(core.defaults.get("adapter"))
    *_, rows = core.engine.logits(ids, first=len(ids) - 1, mix=mix, check=check)
    encode = partial(core.requests.tokenizer.encode, add_special=False)
    yes, no = (float(rows[-1][encode(word)[0]]) for word in ("yes", "no"))
    return yes - no


def pooled_states(
    engine: Engine, texts: Sequence[Sequence[int]], pooling: Pooling, *, check: Check | None = None
) -> Rows:
    """Return the vectors (texts, D) of ``texts``, each a list of at least one token.

    Raises:
        UnsupportedModelError: the engine gives no hidden states.
    """
    sums = np.zeros((len(texts), engine.hidden_size), np.float64)
    begun = set[int]()
    with closing(engine.hidden_states(texts, check=check)) as pieces:
        for index, rows in pieces:  # (n, D)
            if pooling == "mean":
                sums[index] += rows.sum(axis=0, dtype=np.float64)
            elif pooling == "last" or index not in begun:
                sums[index] = rows[-1 if pooling == "last" else 0]
            begun.add(index)
    if pooling == "mean":
        sums /= np.array([len(tokens) for tokens in texts]).reshape(-1, 1)
    return sums.astype(np.float32)


def _check(cancel: threading.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise CancelledError("the request was cancelled")


def _check_length(core: Core, count: int, which: str, more: str = "") -> None:
    if count > core.ctx:
        raise ContextOverflowError(
            f"{which} has {count} tokens{more} and the context holds {core.ctx}: split it, or "
            f"raise {option('ctx')}",
            tokens=count,
            ctx=core.ctx,
        )


def _pooling(asked: str, made_for: str) -> Pooling:
    if asked == "auto":
        if made_for and made_for not in POOLINGS:
            raise OptionError(
                f"the model was made for {made_for} pooling, which is not known here: choose "
                + " or ".join(POOLINGS)
            )
        asked = made_for or "mean"
    for known in POOLINGS:
        if asked == known:
            return known
    raise OptionError(f"pooling must be auto, mean, last or cls, is {asked!r}")


def _tokens(core: Core, text: str | Sequence[int], index: int, check: Check) -> list[int]:
    """Return a text's ids; ``check`` may stop the reading of a long one.

    Raises:
        OptionError: there are none, or the model does not have one of them.
        ContextOverflowError: there are more than the context holds.
    """
    which = f"text {index} (counting from 0)"

    def watch(count: int) -> None:
        check()
        _check_length(core, count, which, " or more")

    if isinstance(text, str):
        tokenizer = core.requests.tokenizer
        watch(tokenizer.least_tokens(text))
        ids = tokenizer.encode_raw(text, watch)
    else:
        ids = whole_ids(text, which)
    if not ids or (isinstance(text, str) and not text):
        raise OptionError(f"{which} is empty: there is nothing to embed")
    if not 0 <= min(ids) <= max(ids) < core.info.vocab_size:
        raise OptionError(
            f"{which}: token ids must be from 0 to {core.info.vocab_size - 1}; send texts, unless "
            "the ids are those of this model's own tokenizer"
        )
    _check_length(core, len(ids), which)
    return ids
