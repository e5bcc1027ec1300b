"""``POST /api/pull``: a model of the hub is downloaded, if the server lets clients do that.

Progress comes as lines. If the client goes away, the download stops; the next one continues it.
Several wait for one another.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localrt.hub import resolve
from localrt.hub.names import looks_like_path
from localrt.progress import NOTE, Progress
from localrt.serve.bodies import read_fields
from localrt.serve.endpoints import service_of
from localrt.serve.errors import ApiError, JsonResponse, failure, invalid, ollama_error
from localrt.serve.generating import until_gone
from localrt.serve.ollama.reply import LINES, line
from localrt.serve.service import Service
from localrt.settings import Settings

__all__ = ["ROUTES"]

_MOST_LINES = 64  # of progress that nobody has read: further ones are left out


async def pull(request: Request) -> Response:
    """POST /api/pull"""
    service = service_of(request)
    fields = await read_fields(request, "OLLAMA_PULL", service.options, service.bodies)
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
    """Whether clients find a model by this very name."""
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
        running.cancel()  # nobody waits for what becomes of it


class _Download:
    """Of the model ``name``, when its ``turn`` has come; ``steps`` are lines of its progress, and
    None at the end.
    """

    def __init__(self, name: str, turn: asyncio.Lock) -> None:
        self._name, self._turn = name, turn
        self._loop = asyncio.get_running_loop()
        self.cancel = threading.Event()
        self.steps: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def run(self) -> None:
        """Until it is here.

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
        """In the thread that downloads."""
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


ROUTES = (("/api/pull", "POST", pull),)
