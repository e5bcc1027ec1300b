"""Turn texts into vectors: the hidden states after the final norm, pooled over tokens."""

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
from localrt.engine.protocol import Engine
from localrt.quant.ops.protocol import Check
from localrt.service.core import Core
from localrt.service.requests import whole_ids

Rows: TypeAlias = npt.NDArray[np.float32]
Pooling = Literal["mean", "last", "cls"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls")


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
    core.requests.check_process()
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


def rank(
    core: Core, query: str, documents: Sequence[str], *, cancel: threading.Event | None
) -> list[float]:
    """See ``Model.rank``."""
    core.requests.check_process()
    if isinstance(documents, str) or not all(isinstance(one, str) for one in (query, *documents)):
        raise OptionError("rank takes a query and a list of documents, all of them strings")
    if core.parts.pooling != "rank" or not core.parts.mute:
        raise OptionError("the model scores no pairs: choose a cross-encoder")
    encode = core.requests.tokenizer.encode_pair
    pairs = [encode(query, document) for document in documents]
    for index, pair in enumerate(pairs):
        _check_length(core, len(pair), f"the query with document {index}")
    scores = pooled_states(core.engine, pairs, "last", check=partial(_check, cancel))[:, 0]
    return [1 / (1 + math.exp(-score)) for score in scores.tolist()]


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
        raise CancelledError("the embedding was cancelled")


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
