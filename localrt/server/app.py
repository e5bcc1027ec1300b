"""The server as an ASGI application: paths, errors, CORS, and the batch that lives with it.

A path is a small function from a request to a response. Wrong fields and the library's errors leave
it as exceptions, which become responses at the end.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from localrt.api import Model
from localrt.common.errors import LocalrtError
from localrt.server import about, texts
from localrt.server.anthropic import routes as anthropic
from localrt.server.bodies import prepare_checks
from localrt.server.errors import (
    ApiError,
    JsonResponse,
    failure,
    invalid,
)
from localrt.server.generating import answer
from localrt.server.guard import Guard, LogLine
from localrt.server.infill import routes as infill
from localrt.server.models import Models, OneModel
from localrt.server.ollama import routes as ollama
from localrt.server.openai.calls import (
    Generation,
    chat_call,
    completion_call,
    prompts_of,
)
from localrt.server.openai.reply import ChatShape, Completion, TextShape
from localrt.server.openapi import describe
from localrt.server.options import ServeOptions
from localrt.server.replies import Reply, TokenBytes
from localrt.server.responses import routes as responses
from localrt.server.service import Service, read_request, service_of
from localrt.server.texts import embedded

_WORKERS = 4
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


# -- answers -------------------------------------------------------------------------------------


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions"""
    asked = await read_request(request, "CHAT")
    return await answer(asked, chat_call(asked.fields, asked.service.note_once), _chat_reply)


async def completions(request: Request) -> Response:
    """POST /v1/completions"""
    asked = await read_request(request, "COMPLETION")
    return await answer(asked, completion_call(asked.fields), _completion_reply)


def _chat_reply(tokens: TokenBytes, call: Generation, name: str) -> Reply:
    return Completion(ChatShape(tokens, call), call, name)


def _completion_reply(tokens: TokenBytes, call: Generation, name: str) -> Reply:
    return Completion(TextShape(tokens, call), call, name)


# -- embeddings ----------------------------------------------------------------------------------


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings"""
    asked = await read_request(request, "EMBEDDINGS")
    fields = asked.fields
    if fields.get("dimensions") is not None:
        raise invalid("dimensions is not supported: vectors have the model's width", "dimensions")
    texts = prompts_of(fields["input"])
    name, vectors, read = await embedded(asked, texts)
    if fields.get("encoding_format") == "base64":
        rows: list[Any] = [base64.b64encode(row.tobytes()).decode() for row in vectors]
    else:
        rows = vectors.tolist()
    data = [
        {"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": read, "total_tokens": read}
    return JsonResponse({"object": "list", "data": data, "model": name, "usage": usage})


# -- about the server ----------------------------------------------------------------------------


async def health(request: Request) -> Response:
    """GET /health"""
    service = service_of(request)
    status = "stopping" if service.stopping else "ok"
    return JsonResponse({"status": status}, status_code=503 if service.stopping else 200)


async def metrics(request: Request) -> Response:
    """GET /metrics"""
    return PlainTextResponse(service_of(request).metrics_text(), media_type=_TEXT_FORMAT)


async def openapi(request: Request) -> Response:
    """GET /openapi.json"""
    return JsonResponse(describe(keyed=service_of(request).options.api_key is not None))


_ROUTES = (
    ("/v1/chat/completions", "POST", chat_completions),
    ("/v1/completions", "POST", completions),
    ("/v1/embeddings", "POST", embeddings),
    ("/health", "GET", health),
    ("/metrics", "GET", metrics),
    ("/openapi.json", "GET", openapi),
    *about.ROUTES,
    *texts.ROUTES,
    *responses.ROUTES,
    *infill.ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
)

# -- the application -----------------------------------------------------------------------------


def create_app(
    model: Model | Models,
    options: ServeOptions | None = None,
    *,
    log: Callable[[LogLine], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Starlette:
    """The application that serves ``model``, which stays the caller's to close, or several.

    ``log`` is called after every request, ``note`` with what is worth saying once. Batches run from
    the application's startup to its shutdown; ``app.state.service`` can be told to ``stop``.
    """
    options = options or ServeOptions()
    models = model if isinstance(model, Models) else OneModel(model, options)
    service = Service(models, options, note)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Tokenizing is short; each thread keeps memory of its own.
        workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="localrt-serve")
        asyncio.get_running_loop().set_default_executor(workers)
        prepare_checks()
        models.open()
        sampling = asyncio.ensure_future(_sample(service))
        try:
            yield
        finally:
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
            service.stop()
            await asyncio.to_thread(models.close)

    paths = [path for path, _, _ in _ROUTES]
    app = Starlette(
        routes=[
            Route(path, function, methods=methods.split()) for path, methods, function in _ROUTES
        ],
        middleware=[Middleware(Guard, service=service, paths=paths, log=log)],
        # The guard answers what else may go wrong.
        exception_handlers=dict.fromkeys((ApiError, LocalrtError, HTTPException), _failed),
        lifespan=lifespan,
    )
    app.state.service = service
    return app


async def _sample(service: Service) -> None:
    while True:
        service.sample()
        await asyncio.sleep(1)


async def _failed(request: Request, error: Exception) -> Response:
    return failure(error).response(request.url.path, request.headers)
