"""Turn texts into vectors: the hidden states after the final norm, pooled over tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
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
Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


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
    chosen = _pooling(pooling, core.parts.pooling)

    def check() -> None:
        if cancel is not None and cancel.is_set():
            raise CancelledError("the embedding was cancelled")

    tokens = [_tokens(core, text, index, check) for index, text in enumerate(texts)]
    check()
    vectors = pooled_states(core.engine, tokens, chosen, check=check)
    if not normalize:
        return vectors
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Rows = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit


def pooled_states(
    engine: Engine, texts: Sequence[Sequence[int]], pooling: Pooling, *, check: Check | None = None
) -> Rows:
    """Return the vectors (texts, D) of ``texts``, each a list of at least one token.

    Raises:
        UnsupportedModelError: the engine gives no hidden states.
    """
    sums = np.zeros((len(texts), engine.hidden_size), np.float64)
    with closing(engine.hidden_states(texts, check=check)) as pieces:
        for index, rows in pieces:  # (n, D)
            if pooling == "mean":
                sums[index] += rows.sum(axis=0, dtype=np.float64)
            else:
                sums[index] = rows[-1]
    if pooling == "mean":
        sums /= np.array([len(tokens) for tokens in texts]).reshape(-1, 1)
    return sums.astype(np.float32)


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
    raise OptionError(f"pooling must be auto, {' or '.join(POOLINGS)}, is {asked!r}")


def _tokens(core: Core, text: str | Sequence[int], index: int, check: Check) -> list[int]:
    """Return a text's ids; ``check`` may stop the reading of a long one.

    Raises:
        OptionError: there are none, or the model does not have one of them.
        ContextOverflowError: there are more than the context holds.
    """
    which = f"text {index} (counting from 0)"

    def watch(count: int) -> None:
        check()
        if count > core.ctx:
            raise ContextOverflowError(
                f"{which} has {count} tokens or more and the context holds {core.ctx}: split it, "
                f"or raise {option('ctx')}",
                tokens=count,
                ctx=core.ctx,
            )

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
    if len(ids) > core.ctx:
        raise ContextOverflowError(
            f"{which} has {len(ids)} tokens and the context holds {core.ctx}: split it, or "
            f"raise {option('ctx')}",
            tokens=len(ids),
            ctx=core.ctx,
        )
    return ids
