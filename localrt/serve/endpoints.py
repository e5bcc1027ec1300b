"""The paths of the server, each a small function from a request to a response.

Wrong fields and the library's errors leave them as exceptions, which ``app`` turns into responses.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localrt.engine.types import Chunk
from localrt.serve.bodies import read_fields
from localrt.serve.calls import Call, chat_call, completion_call
from localrt.serve.errors import ApiError, JsonResponse, invalid
from localrt.serve.generating import answer, until_gone
from localrt.serve.openapi import describe
from localrt.serve.payloads import chat_logprobs, completion_logprobs, tool_calls
from localrt.serve.service import Service

__all__ = [
    "chat_completions",
    "completions",
    "embeddings",
    "health",
    "metrics",
    "model",
    "models",
    "openapi",
]

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


def _service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service), "the app was made by create_app"
    return service


# -- answers -------------------------------------------------------------------------------------


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions"""
    service = _service(request)
    fields = await read_fields(request, "CHAT", service.options)
    service.check_model(fields.get("model"))
    call = chat_call(fields)
    return await answer(request, service, call, _Chat(service, call))


async def completions(request: Request) -> Response:
    """POST /v1/completions"""
    service = _service(request)
    fields = await read_fields(request, "COMPLETION", service.options)
    service.check_model(fields.get("model"))
    call = completion_call(fields)
    return await answer(request, service, call, _Text(service, call))


class _Chat:
    """See ``Shape``."""

    kind, stream_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, call: Call) -> None:
        self._tokenizer = service.model.tokenizer
        self._logprobs = call.logprobs

    def _shown(self, chunk: Chunk) -> dict[str, Any] | None:
        return chat_logprobs(chunk.logprobs, self._tokenizer) if self._logprobs else None

    def whole(self, index: int, chunk: Chunk) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": chunk.text, "refusal": None}
        if chunk.tool_calls:
            message["content"] = chunk.text or None
            message["tool_calls"] = tool_calls(chunk)
        return {
            "index": index,
            "message": message,
            "logprobs": self._shown(chunk),
            "finish_reason": chunk.finish_reason,
        }

    def first(self, index: int) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def delta(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        found = []
        if chunk.text or chunk.logprobs:
            found.append(self._delta(index, {"content": chunk.text}, logprobs=self._shown(chunk)))
        if chunk.tool_calls:
            found.append(self._delta(index, {"tool_calls": tool_calls(chunk, streamed=True)}))
        if chunk.finish_reason is not None:
            found.append(self._delta(index, {}, reason=chunk.finish_reason))
        return found

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class _Text:
    """See ``Shape``."""

    kind, stream_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, service: Service, call: Call) -> None:
        self._tokenizer = service.model.tokenizer
        self._call = call
        self._lengths: dict[int, int] = {}  # of the texts so far, for offsets

    def whole(self, index: int, chunk: Chunk) -> dict[str, Any]:
        echo = "" if self._call.echo is None else self._call.echo[index]
        return self._choice(index, echo + chunk.text, chunk)

    def first(self, index: int) -> list[dict[str, Any]]:
        if self._call.echo is None:
            return []
        text = self._call.echo[index]
        return [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]

    def delta(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        return [self._choice(index, chunk.text, chunk)]

    def _choice(self, index: int, text: str, chunk: Chunk) -> dict[str, Any]:
        shown = None
        if self._call.logprobs:
            start = self._lengths.get(index, 0)
            shown = completion_logprobs(chunk.logprobs, self._tokenizer, start=start)
            self._lengths[index] = start + sum(map(len, shown["tokens"]))
        return {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": chunk.finish_reason,
        }


# -- embeddings ----------------------------------------------------------------------------------


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings"""
    service = _service(request)
    fields = await read_fields(request, "EMBEDDINGS", service.options)
    service.check_model(fields.get("model"))
    if fields.get("dimensions") is not None:
        raise invalid("dimensions is not supported: vectors have the model's width", "dimensions")
    texts = _embedded(fields["input"])
    model, cancel = service.model, threading.Event()

    def compute() -> tuple[Any, int]:
        vectors = model.embed(texts, cancel=cancel)
        ids = (len(model.tokenize(text)) if isinstance(text, str) else len(text) for text in texts)
        return np.ascontiguousarray(vectors, "<f4"), sum(ids)

    async def work() -> tuple[Any, int]:
        async with service.embedding:
            return await asyncio.to_thread(compute)

    with service.admitted():
        try:
            vectors, read = await until_gone(request, work())
        finally:
            cancel.set()
    if not np.isfinite(vectors).all():
        raise ApiError(500, "the model computes no numbers for this input")
    base64_wanted = fields.get("encoding_format") == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(row.tobytes()).decode()
            if base64_wanted
            else row.tolist(),
        }
        for index, row in enumerate(vectors)
    ]
    return JsonResponse(
        {
            "object": "list",
            "data": data,
            "model": service.name,
            "usage": {"prompt_tokens": read, "total_tokens": read},
        }
    )


def _embedded(given: Any) -> list[str | list[int]]:
    """Texts, or the ids of each."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], str):
        return list(given)
    lists = given if isinstance(given[0], list) else [given]
    return [[int(token) for token in ids] for ids in lists]


# -- about the server ----------------------------------------------------------------------------


def _model_object(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "localrt",
        "max_model_len": service.model.info.ctx,
    }


async def models(request: Request) -> Response:
    """GET /v1/models"""
    return JsonResponse({"object": "list", "data": [_model_object(_service(request))]})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME"""
    service = _service(request)
    service.check_model(request.path_params["name"])
    return JsonResponse(_model_object(service))


async def health(request: Request) -> Response:
    """GET /health"""
    service = _service(request)
    status = "stopping" if service.stopping else "ok"
    return JsonResponse({"status": status}, status_code=503 if service.stopping else 200)


async def metrics(request: Request) -> Response:
    """GET /metrics"""
    return PlainTextResponse(_service(request).metrics_text(), media_type=_TEXT_FORMAT)


async def openapi(request: Request) -> Response:
    """GET /openapi.json"""
    return JsonResponse(describe(keyed=_service(request).options.api_key is not None))
