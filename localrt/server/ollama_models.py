"""Ollama's endpoints about models: list, show, running models, and downloads.

A download reports its progress in lines. If the client disconnects, it stops; the next request
continues it. Downloads run one at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localrt.common.progress import NOTE, Progress
from localrt.common.settings import Settings
from localrt.common.version import __version__
from localrt.hub import resolve
from localrt.hub.names import looks_like_path
from localrt.server.about import known_facts
from localrt.server.bodies import read_fields
from localrt.server.dialect import Endpoint
from localrt.server.errors import ApiError, JsonResponse, failure, invalid, ollama_error
from localrt.server.generating import until_gone
from localrt.server.models import ModelEntry
from localrt.server.ollama import LINES, line
from localrt.server.request_schema import FILLED, FLAG, Field, RequestSchema
from localrt.server.service import Service, service_of

NAMED = RequestSchema(
    {"model": Field(FILLED), "name": Field(FILLED), "stream": Field(FLAG)},
    anyOf=[{"required": ["model"]}, {"required": ["name"]}],
)
_PROTOCOL = "0.12.0"  # Ollama's version: clients refuse older ones
_FOR_EVER = timedelta(days=36500)


async def version(_: Request) -> Response:
    """The protocol's version (Ollama)."""
    return JsonResponse({"version": _PROTOCOL, "localrt": __version__})


async def tags(request: Request) -> Response:
    """The models that there are (Ollama)."""
    offered = service_of(request).models.offered()
    return JsonResponse({"models": await asyncio.to_thread(_listed, offered)})


async def ps(request: Request) -> Response:
    """The models that are loaded (Ollama)."""
    service = service_of(request)
    at_work = {served.name: served for served in service.models.at_work()}
    offered = [one for one in service.models.offered() if one.name in at_work]
    found = await asyncio.to_thread(_listed, offered)
    for one, entry in zip(offered, found, strict=True):
        vram = at_work[one.name].model.status().vram
        left = _FOR_EVER if one.unload_s is None else timedelta(seconds=one.unload_s)
        entry |= {
            "size": one.ram + (vram.used if vram else 0),
            "size_vram": vram.used if vram else 0,
            "expires_at": (datetime.now(UTC) + left).isoformat(),
            "context_length": one.ctx,
        }
    return JsonResponse({"models": found})


async def show(request: Request) -> Response:
    """What a model is (Ollama)."""
    service = service_of(request)
    fields = await read_fields(request, NAMED, service.options, service.bodies)
    offered = service.models.find(fields.get("model") or fields["name"])
    facts = await asyncio.to_thread(known_facts, offered)
    return JsonResponse(
        {
            "license": "",
            "modelfile": f"FROM {offered.name}\n",
            "parameters": "" if offered.ctx is None else f"num_ctx {offered.ctx}",
            "template": facts.template,
            "modified_at": _modified(offered),
            "details": facts.details(),
            "model_info": facts.info(offered.ctx),
            "capabilities": facts.capabilities,
        }
    )


async def not_here(request: Request) -> Response:
    """What Ollama does with models, and this server does not."""
    raise ApiError(
        501,
        f"{request.url.path} is not supported: manage models with `localrt list`, `localrt pull` "
        "and `localrt rm`",
    )


def _listed(offered: Sequence[ModelEntry]) -> list[dict[str, object]]:
    return [
        {
            "name": one.name,
            "model": one.name,
            "modified_at": _modified(one),
            "size": one.nbytes or 0,
            "digest": hashlib.sha256(f"{one.name} {one.nbytes}".encode()).hexdigest(),
            "details": known_facts(one).details(),
        }
        for one in offered
    ]


def _modified(offered: ModelEntry) -> str:
    try:
        since = 0.0 if offered.path is None else offered.path.stat().st_mtime
    except OSError:
        since = 0.0
    return datetime.fromtimestamp(since, UTC).isoformat()


# -- downloads -------------------------------------------------------------------------------------


_MOST_LINES = 64  # the most unread progress lines: later ones are dropped


async def pull(request: Request) -> Response:
    """Download a model of the hub (Ollama)."""
    service = service_of(request)
    fields = await read_fields(request, NAMED, service.options, service.bodies)
    name = fields.get("model") or fields["name"]
    if _is_here(service, name):
        done = {"status": "success"}
        whole = fields.get("stream") is False
        return JsonResponse(done) if whole else Response(line(done), media_type=LINES)
    if not service.options.allow_pull:
        raise ApiError(
            403,
            "this server does not let clients download models: start it with --allow-pull, or use "
            "`localrt pull`",
        )
    if looks_like_path(name) or os.path.lexists(name):
        raise invalid(f"{name[:200]!r} is no model of the hub", "model")
    if fields.get("stream") is False:
        download = _Download(name, service.downloads)
        try:
            await until_gone(request, download.run())
        finally:
            download.cancel.set()
        return JsonResponse({"status": "success"})
    return StreamingResponse(_lines(_Download(name, service.downloads)), media_type=LINES)


def _is_here(service: Service, name: str) -> bool:
    """Whether clients can find a model by exactly this name."""
    with suppress(ApiError):
        service.models.find(name, exact=True)
        return True
    return False


async def _lines(download: _Download) -> AsyncIterator[bytes]:
    running = asyncio.ensure_future(download.run())
    try:
        yield line({"status": "pulling manifest"})
        while (found := await download.steps.get()) is not None:
            yield line(found)
        await running
        yield line({"status": "success"})
    except Exception as error:  # noqa: BLE001  it has become the stream's last line
        yield line(ollama_error(failure(error)))
    finally:
        download.cancel.set()
        running.cancel()  # the client no longer waits for its result


class _Download:
    """A download of the model ``name``, once its ``turn`` has come; ``steps`` has lines of
    progress, and None at the end.
    """

    def __init__(self, name: str, turn: asyncio.Lock) -> None:
        self._name, self._turn = name, turn
        self._loop = asyncio.get_running_loop()
        self.cancel = threading.Event()
        self.steps: asyncio.Queue[dict[str, object] | None] = asyncio.Queue()

    async def run(self) -> None:
        """Run until the model is downloaded.

        Raises:
            LocalrtError: it is not on the hub, or the download failed.
        """
        try:
            async with self._turn:
                await asyncio.to_thread(
                    resolve,
                    self._name,
                    settings=Settings.from_environment(),
                    progress=self._report,
                    cancel=self.cancel,
                )
        finally:
            self.steps.put_nowait(None)

    def _report(self, progress: Progress) -> None:
        """Report progress from the thread that downloads."""
        self._loop.call_soon_threadsafe(self._put, progress)

    def _put(self, progress: Progress) -> None:
        if progress.stage == NOTE:
            self.steps.put_nowait({"status": progress.detail})
        elif self.steps.qsize() < _MOST_LINES:
            words = f"pulling {progress.detail}" if progress.stage == "download" else progress.stage
            sizes = {"completed": progress.done, "total": progress.total}
            self.steps.put_nowait(
                {"status": words, "digest": progress.detail}
                | {name: size for name, size in sizes.items() if size is not None}
            )


ROUTES = (
    Endpoint("/api/version", "GET", version),
    Endpoint("/api/tags", "GET", tags),
    Endpoint("/api/ps", "GET", ps),
    Endpoint("/api/show", "POST", show),
    Endpoint("/api/pull", "POST", pull),
    *(Endpoint(f"/api/{name}", "POST", not_here) for name in ("create", "copy", "push")),
    Endpoint("/api/delete", "DELETE", not_here),
)
