"""``Model.embed``: texts checked and tokenized, pooled as the model was made for.

What computes is ``localrt.engine.embedding``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localrt.engine.embedding import (
    POOLINGS,
    Pooling,
    Rows,
    unit_length,
)
from localrt.engine.embedding import embed as compute
from localrt.errors import (
    CancelledError,
    ContextOverflowError,
    OptionError,
)

if TYPE_CHECKING:
    from localrt.api import Model

__all__ = ["embed"]


def embed(
    model: Model,
    texts: Sequence[str | Sequence[int]],
    *,
    pooling: str,
    normalize: bool,
    cancel: threading.Event | None,
) -> Rows:
    """See ``Model.embed``."""
    if isinstance(texts, str):
        raise OptionError("embed takes a list of texts: [text] for a single one")
    engine = model._parts.engine
    _ = engine.hidden_size  # raises where there are none
    chosen = _pooling(pooling, model._parts.pooling)
    tokens = [_tokens(model, text, index) for index, text in enumerate(texts)]

    def check() -> None:
        if cancel is not None and cancel.is_set():
            raise CancelledError("the embedding was cancelled")

    check()
    vectors = compute(engine, tokens, chosen, check=check)
    return unit_length(vectors) if normalize else vectors


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


def _tokens(model: Model, text: str | Sequence[int], index: int) -> Sequence[int]:
    """A text's ids.

    Raises:
        OptionError: there are none, or one that the model does not have.
        ContextOverflowError: they are more than the context holds.
    """
    which = f"text {index} (counting from 0)"
    ids = model.tokenize(text) if isinstance(text, str) else [int(token) for token in text]
    if not ids or (isinstance(text, str) and not text):
        raise OptionError(f"{which} is empty: there is nothing to embed")
    if not 0 <= min(ids) <= max(ids) < model.info.vocab_size:
        raise OptionError(f"{which}: token ids must be from 0 to {model.info.vocab_size - 1}")
    if len(ids) > model.info.ctx:
        raise ContextOverflowError(
            f"{which} has {len(ids)} tokens and the context holds {model.info.ctx}: split it, or "
            "raise --ctx"
        )
    return ids
