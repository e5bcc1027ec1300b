"""Endpoints that read texts: tokenization, embeddings, and reranking."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from localrt.api import Model
from localrt.engine.protocol import Logits
from localrt.server.dialect import Endpoint, prompts_of
from localrt.server.errors import ApiError, JsonResponse, invalid
from localrt.server.generating import computed, rendered
from localrt.server.openai.calls import MESSAGES, chat_call, prompts_schema
from localrt.server.request_schema import (
    FILLED,
    FLAG,
    IDS,
    STRING,
    TEXT,
    Field,
    RequestSchema,
    integer,
    list_of,
    required,
    shared,
)
from localrt.server.service import ModelRequest, read_request
from localrt.service.embedding import is_reranker

EMBEDDINGS = RequestSchema(
    {
        **shared("dimensions"),
        "model": Field(TEXT),
        "input": required(prompts_schema(list_of({}, maxItems=0))),
        "encoding_format": Field({"enum": ["float", "base64", None]}),
    }
)
_DOCUMENT = {"type": ["string", "object"], "required": ["text"], "properties": {"text": STRING}}
RERANK = RequestSchema(
    {
        "model": Field(TEXT),
        "query": required(FILLED),
        "documents": required(list_of(_DOCUMENT, minItems=1)),
        "top_n": Field(integer(1)),
        "return_documents": Field(FLAG),
        "instruction": Field(TEXT),
    }
)
TOKENIZE = RequestSchema(
    {
        **shared("tools"),
        "model": Field(TEXT),
        "messages": Field(MESSAGES),
        **dict.fromkeys(("content", "prompt"), Field(TEXT)),  # llama.cpp's and vLLM's name
        **dict.fromkeys(("add_special", "add_special_tokens"), Field(FLAG)),
        "parse_special": Field(FLAG),
        "with_pieces": Field(FLAG),
        "return_token_strs": Field(FLAG),
    }
)
DETOKENIZE = RequestSchema({"model": Field(TEXT), "tokens": required({**IDS, "minItems": 0})})


class Embedded(NamedTuple):
    """``vectors`` (texts, width) as little-endian float32, of ``tokens`` read, by ``model``."""

    model: str
    vectors: Logits
    tokens: int


async def embedded(
    model_request: ModelRequest,
    texts: Sequence[str | list[int]],
    *,
    dimensions: int | None = None,
    truncate: bool = False,
) -> Embedded:
    """Return the vectors of ``texts``, or of their token ids, by the requested model.

    ``truncate`` cuts off the end of a text longer than the context. An empty text has the vector of
    a space. ``dimensions`` keeps the first columns, at length 1 again.

    Raises:
        ApiError: it is an adapter, produced NaN values, or has fewer ``dimensions``.
        LocalrtError: a text is too long.
        ClientDisconnect: the client has disconnected.
    """
    if model_request.model.base is not None:
        raise invalid("embeddings are the base model's alone, without an adapter", "model")
    texts = [text or " " for text in texts]

    def compute(model: Model, cancel: threading.Event) -> tuple[Logits, int]:
        read = model.tokenizer.encode_raw
        ids = [read(text) if isinstance(text, str) else text for text in texts]
        ctx = model.info.ctx
        given = [
            one[:ctx] if truncate and len(one) > ctx else text
            for text, one in zip(texts, ids, strict=True)
        ]
        vectors = model.embed(given, cancel=cancel) if given else np.zeros((0, 0))
        count = sum(min(len(one), ctx) for one in ids)
        return np.ascontiguousarray(vectors, "<f4"), count

    vectors, count = await computed(model_request, compute)
    if not np.isfinite(vectors).all():
        raise ApiError(500, "the model produced NaN values for this input")
    if dimensions is not None and (width := vectors.shape[1]):
        if dimensions > width:
            raise invalid(f"dimensions must be at most {width}, the model's width", "dimensions")
        if dimensions < width:
            vectors = np.ascontiguousarray(vectors[:, :dimensions])
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return Embedded(model_request.model.name, vectors, count)


# -- endpoints -------------------------------------------------------------------------------------


async def embeddings(request: Request) -> Response:
    """Vectors of texts."""
    asked = await read_request(request, EMBEDDINGS)
    fields = asked.fields
    name, vectors, read = await embedded(
        asked, prompts_of(fields["input"]), dimensions=fields.get("dimensions")
    )
    if fields.get("encoding_format") == "base64":
        rows: list[object] = [base64.b64encode(row.tobytes()).decode() for row in vectors]
    else:
        rows = vectors.tolist()
    data = [
        {"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": read, "total_tokens": read}
    return JsonResponse({"object": "list", "data": data, "model": name, "usage": usage})


async def tokenize(request: Request) -> Response:
    """Tokens of a text or a conversation."""
    asked = await read_request(request, TOKENIZE)
    fields = asked.fields
    # llama.cpp has the text in content, vLLM in prompt.
    text = next((fields[name] for name in ("content", "prompt") if fields.get(name)), "")
    added = fields.get("add_special", fields.get("add_special_tokens"))
    special = fields.get("content") is None if added is None else added

    parse = fields.get("parse_special") is not False

    def of_text(model: Model, _: threading.Event) -> dict[str, object]:
        ids = model.tokenizer.encode(text, add_special=special, parse_special=parse)
        return shown(model, ids)

    def of_messages(model: Model, arguments: Mapping[str, Any]) -> dict[str, object]:
        return shown(model, model.tokenize(arguments["prompt"], tools=arguments["tools"]))

    def shown(model: Model, ids: Sequence[int]) -> dict[str, object]:
        ids = [max(one, -1) for one in ids]  # below 0: of a picture
        pieces = [
            "" if one < 0 else model.tokenizer.token_bytes(one).decode("utf-8", "replace")
            for one in ids
        ]
        tokens: list[object] = list(ids)
        if fields.get("with_pieces"):
            tokens = [{"id": one, "piece": piece} for one, piece in zip(ids, pieces, strict=True)]
        more = {"token_strs": pieces} if fields.get("return_token_strs") else {}
        return {"tokens": tokens, "count": len(ids), "max_model_len": model.info.ctx, **more}

    if fields.get("messages"):
        return JsonResponse(await rendered(asked, chat_call(fields), of_messages))
    return JsonResponse(await computed(asked, of_text))


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    asked = await read_request(request, DETOKENIZE)

    def work(model: Model, _: threading.Event) -> str:
        return model.detokenize([int(one) for one in asked.fields["tokens"]], skip_special=False)

    text = await computed(asked, work)
    return JsonResponse({"content": text, "prompt": text})


async def rerank(request: Request) -> Response:
    """Documents by how well they answer."""
    asked = await read_request(request, RERANK)
    fields = asked.fields
    texts = [one if isinstance(one, str) else one["text"] for one in fields["documents"]]

    def work(model: Model, cancel: threading.Event) -> tuple[list[float], int]:
        if not model.info.pooling or is_reranker(model.info):
            more = {"instruction": fields.get("instruction"), "cancel": cancel}
            return model.rank_counted(fields["query"], texts, **more)
        ids = [model.tokenizer.encode_raw(text) for text in (fields["query"], *texts)]
        asked, *found = model.embed(ids, cancel=cancel)
        return [float(asked @ vector) for vector in found], sum(map(len, ids))

    scores, read = await computed(asked, work)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    order = order[: fields.get("top_n") or len(order)]
    shown = fields.get("return_documents")
    results = [
        {
            "index": at,
            "relevance_score": scores[at],
            **({"document": {"text": texts[at]}} if shown else {}),
        }
        for at in order
    ]
    usage = {"prompt_tokens": read, "total_tokens": read}
    return JsonResponse(
        {"object": "list", "model": asked.model_name, "results": results, "usage": usage}
    )


ROUTES = (
    Endpoint("/v1/embeddings", "POST", embeddings),
    Endpoint("/tokenize", "POST", tokenize),
    Endpoint("/detokenize", "POST", detokenize),
    Endpoint("/v1/rerank", "POST", rerank),
)
