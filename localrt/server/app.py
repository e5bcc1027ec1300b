"""The server as an ASGI application: paths, errors, CORS, and the lifetime of batches.

An endpoint is a small function from a request to a response. Exceptions for invalid fields and
library errors are turned into responses here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from localrt.api import Model
from localrt.common.errors import LocalrtError
from localrt.history import History
from localrt.server import (
    about,
    anthropic,
    chat_settings,
    conversations,
    infill,
    ollama,
    ollama_models,
    page,
    texts,
)
from localrt.server.answers import Answers
from localrt.server.dialect import Endpoint, Handler
from localrt.server.errors import ApiError, JsonResponse, failure
from localrt.server.guard import Guard, LogLine
from localrt.server.models import Models, OneModel
from localrt.server.openai import calls as openai_calls
from localrt.server.openai import reply as openai
from localrt.server.options import ServeOptions
from localrt.server.responses import calls as responses_calls
from localrt.server.responses import reply as responses
from localrt.server.service import Service, service_of
from localrt.system import return_free_memory

_WORKERS = 4
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


# -- about the server ----------------------------------------------------------------------------


async def health(request: Request) -> Response:
    """Whether the server is up."""
    service = service_of(request)
    stopping = service.draining or service.stopping
    status = "stopping" if stopping else "ok"
    return JsonResponse({"status": status}, status_code=503 if stopping else 200)


async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    return PlainTextResponse(service_of(request).metrics_text(), media_type=_TEXT_FORMAT)


ROUTES = (
    *page.ROUTES,
    Endpoint("/health", "GET", health),
    Endpoint("/metrics", "GET", metrics),
    *openai.ROUTES,
    *texts.ROUTES,
    *about.ROUTES,
    *responses.ROUTES,
    *chat_settings.ROUTES,  # a path with a name comes before one with an id
    *conversations.ROUTES,
    *infill.ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
    *ollama_models.ROUTES,
)

SCHEMAS = (
    *(openai_calls.CHAT, openai_calls.COMPLETION, texts.EMBEDDINGS, texts.RERANK),
    *(texts.TOKENIZE, texts.DETOKENIZE, infill.FIM, infill.INFILL),
    *(responses_calls.RESPONSES, responses_calls.INPUT_TOKENS, *conversations.SCHEMAS),
    *(anthropic.MESSAGES, anthropic.COUNT_TOKENS, ollama.CHAT, ollama.GENERATE),
    *(ollama.EMBED, ollama.EMBEDDINGS, ollama_models.NAMED, *chat_settings.SCHEMAS),
)

# -- the application -----------------------------------------------------------------------------


def create_app(
    model: Model | Models,
    options: ServeOptions | None = None,
    *,
    log: Callable[[LogLine], None] | None = None,
    note: Callable[[str], None] | None = None,
    open_history: Callable[[], History] | None = None,
    config_dir: Path | None = None,
) -> Starlette:
    """Return the application that serves ``model``, which the caller closes, or several models.

    ``log`` is called after every request, ``note`` with one-time log lines; ``open_history`` gives
    the conversations, and ``config_dir`` names MCP servers, by default the user's. Batches run from
    the application's startup to its shutdown; ``app.state.service`` can be told to ``stop``.
    """
    options = options or ServeOptions()
    models = model if isinstance(model, Models) else OneModel(model, options)
    service = Service(models, options, note)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Tokenizing is short, and each thread keeps memory of its own.
        workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="localrt-serve")
        asyncio.get_running_loop().set_default_executor(workers)
        for schema in SCHEMAS:
            schema.prepare()
        return_free_memory()
        models.open()
        tending = asyncio.ensure_future(_tend(models))
        try:
            yield
        finally:
            tending.cancel()
            with suppress(asyncio.CancelledError):
                await tending
            service.stop()
            await app.state.answers.close(service)
            await asyncio.to_thread(models.close)

    paths = [one.path for one in ROUTES]
    app = Starlette(
        routes=_routes(),
        middleware=[Middleware(Guard, service=service, paths=paths, log=log)],
        # The guard answers other errors.
        exception_handlers=dict.fromkeys((ApiError, LocalrtError, HTTPException), _failed),
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.answers = Answers(open_history or partial(History, patient=True), config_dir)
    return app


def _routes() -> list[Route]:
    """Make one route per path, so that a wrong method is answered with the allowed ones."""
    paths: dict[str, dict[str, Handler]] = {}
    for one in ROUTES:
        paths.setdefault(one.path, {})[one.method] = one.handler
    return [Route(path, _by_method(found), methods=[*found]) for path, found in paths.items()]


def _by_method(handlers: Mapping[str, Handler]) -> Handler:
    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handle


async def _tend(models: Models) -> None:
    while True:
        models.tend()
        await asyncio.sleep(1)


async def _failed(request: Request, error: Exception) -> Response:
    return failure(error).response(request.url.path, request.headers)
