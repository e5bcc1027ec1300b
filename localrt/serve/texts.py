"""Endpoints about texts that write none: tokens, and which documents answer a query."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from localrt.api import Model
from localrt.serve.calls import chat_call
from localrt.serve.endpoints import fields_of, service_of
from localrt.serve.errors import JsonResponse
from localrt.serve.facts import known_facts
from localrt.serve.generating import until_gone
from localrt.serve.reranking import scores_of

__all__ = ["ROUTES"]

T = TypeVar("T")


async def _computed(
    request: Request, fields: dict[str, Any], work: Callable[[Model, threading.Event], T]
) -> T:
    """What ``work`` says, in a thread, of the model that a request asks for."""
    service, cancel = service_of(request), threading.Event()

    async def run() -> T:
        async with service.using(fields.get("model")) as served, served.embedding:
            return await asyncio.to_thread(work, served.model, cancel)

    with service.admitted():
        try:
            return await until_gone(request, run())
        finally:
            cancel.set()


async def tokenize(request: Request) -> Response:
    """POST /tokenize: ``content`` as llama.cpp has it, ``prompt`` or ``messages`` as vLLM."""
    fields = await fields_of(request, "TOKENIZE")
    text = next((fields[name] for name in ("content", "prompt") if fields.get(name)), "")
    added = fields.get("add_special", fields.get("add_special_tokens"))
    special = fields.get("content") is None if added is None else added

    parse = fields.get("parse_special") is not False

    def work(model: Model, _: threading.Event) -> dict[str, Any]:
        if fields.get("messages"):
            (given,) = chat_call(fields).prompts
            ids = model.tokenize(given["prompt"], tools=given["tools"])
        else:
            ids = model.tokenizer.encode(text, add_special=special, parse_special=parse)
        pieces = [model.tokenizer.token_bytes(one).decode("utf-8", "replace") for one in ids]
        shown: list[Any] = list(ids)
        if fields.get("with_pieces"):
            shown = [{"id": one, "piece": piece} for one, piece in zip(ids, pieces, strict=True)]
        more = {"token_strs": pieces} if fields.get("return_token_strs") else {}
        return {"tokens": shown, "count": len(ids), "max_model_len": model.info.ctx, **more}

    return JsonResponse(await _computed(request, fields, work))


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info, vLLM's, by which lm-eval does without a tokenizer of its own"""

    def work(model: Model, _: threading.Event) -> dict[str, Any]:
        tokenizer = model.tokenizer
        ends = {
            "bos_token": tokenizer.bos_id,
            "eos_token": min(tokenizer.eos_ids, default=None),
        }
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": model.info.ctx,
            **{
                name: None if token is None else tokenizer.token_bytes(token).decode()
                for name, token in ends.items()
            },
        }

    name = request.query_params.get("model")
    found = await _computed(request, {"model": name}, work)
    facts = await asyncio.to_thread(known_facts, service_of(request).models.find(name))
    return JsonResponse({**found, "chat_template": facts.template or None})


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text as llama.cpp and as vLLM call it"""
    fields = await fields_of(request, "DETOKENIZE")

    def work(model: Model, _: threading.Event) -> str:
        return model.detokenize([int(one) for one in fields["tokens"]], skip_special=False)

    text = await _computed(request, fields, work)
    return JsonResponse({"content": text, "prompt": text})


async def rerank(request: Request) -> Response:
    """POST /v1/rerank, in the form of Jina and Cohere"""
    fields = await fields_of(request, "RERANK")
    texts = [one if isinstance(one, str) else one["text"] for one in fields["documents"]]

    def work(model: Model, cancel: threading.Event) -> tuple[list[float], int]:
        instruction = fields.get("instruction")
        return scores_of(model, fields["query"], texts, instruction=instruction, cancel=cancel)

    scores, read = await _computed(request, fields, work)
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
    name = fields.get("model") or service_of(request).models.find(None).name
    usage = {"prompt_tokens": read, "total_tokens": read}
    return JsonResponse({"object": "list", "model": name, "results": results, "usage": usage})


ROUTES = (
    ("/tokenize", "POST", tokenize),
    ("/detokenize", "POST", detokenize),
    ("/tokenizer_info", "GET", tokenizer_info),
    ("/v1/rerank", "POST", rerank),
    ("/v1/reranking", "POST", rerank),
)
