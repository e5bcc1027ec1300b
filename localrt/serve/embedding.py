"""Vectors of texts, for the endpoints of every dialect."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from starlette.requests import Request

from localrt.api import Model
from localrt.engine.protocol import Logits
from localrt.serve.errors import ApiError, invalid
from localrt.serve.generating import until_gone
from localrt.serve.service import Service

__all__ = ["Embedded", "embedded"]


class Embedded(NamedTuple):
    """``vectors`` (texts, width) as little-endian float32, of ``tokens`` read, by ``model``."""

    model: str
    vectors: Logits
    tokens: int


async def embedded(
    request: Request,
    service: Service,
    name: str | None,
    texts: Sequence[str | list[int]],
    *,
    truncate: bool = False,
) -> Embedded:
    """The vectors of ``texts``, or of their token ids, by the model ``name``.

    With ``truncate`` a text that is longer than the context loses its end. An empty text has the
    vector of a space.

    Raises:
        ApiError: it is an adapter, or computes no numbers.
        LocalrtError: a text is too long.
        ClientDisconnect: nobody waits for it.
    """
    if service.models.find(name).base is not None:
        raise invalid("embeddings are the base model's alone, without an adapter", "model")
    cancel = threading.Event()
    texts = [text or " " for text in texts]

    def compute(model: Model) -> tuple[Logits, int]:
        ids = [model.tokenize(text) if isinstance(text, str) else text for text in texts]
        ctx = model.info.ctx
        given = [
            one[:ctx] if truncate and len(one) > ctx else text
            for text, one in zip(texts, ids, strict=True)
        ]
        vectors = model.embed(given, cancel=cancel) if given else np.zeros((0, 0))
        read = sum(min(len(one), ctx) for one in ids)
        return np.ascontiguousarray(vectors, "<f4"), read

    async def work() -> Embedded:
        async with service.using(name) as served, served.embedding:
            return Embedded(served.name, *await asyncio.to_thread(compute, served.model))

    with service.admitted():
        try:
            found = await until_gone(request, work())
        finally:
            cancel.set()
    if not np.isfinite(found.vectors).all():
        raise ApiError(500, "the model computes no numbers for this input")
    return found
