"""The server as an ASGI application: paths, errors, CORS, and the batch that lives with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from localrt.api import Model
from localrt.errors import LocalrtError
from localrt.serve.endpoints import ROUTES
from localrt.serve.errors import ApiError, api_error
from localrt.serve.guard import Guard, LogLine
from localrt.serve.options import ServeOptions
from localrt.serve.service import Service

__all__ = ["create_app"]

_WORKERS = 4


def create_app(
    model: Model,
    options: ServeOptions | None = None,
    *,
    log: Callable[[LogLine], None] | None = None,
) -> Starlette:
    """The application that serves ``model``, which stays the caller's to close.

    ``log`` is called after every request. The batch runs from the application's startup to its
    shutdown; ``app.state.service`` can be told to ``stop``.
    """
    options = options or ServeOptions()
    service = Service(model, options)
    paths = frozenset(path for path, _, _ in ROUTES)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Tokenizing is short; each thread keeps memory of its own.
        workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="localrt-serve")
        asyncio.get_running_loop().set_default_executor(workers)
        service.open()
        sampling = asyncio.ensure_future(_sample(service))
        try:
            yield
        finally:
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
            service.stop()
            await asyncio.to_thread(service.close)

    middleware = [Middleware(Guard, service=service, paths=paths, log=log)]
    if options.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    app = Starlette(
        routes=[Route(path, function, methods=[method]) for path, method, function in ROUTES],
        middleware=middleware,
        exception_handlers=dict.fromkeys(
            (ApiError, LocalrtError, HTTPException, Exception), _failed
        ),
        lifespan=lifespan,
    )
    app.state.service = service
    return app


async def _sample(service: Service) -> None:
    while True:
        service.sample()
        await asyncio.sleep(1)


async def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, LocalrtError):
        error = api_error(error)
    elif isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"the server failed: {type(error).__name__}")
    return error.response()
