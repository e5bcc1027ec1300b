"""The app in a browser tab: ``textual-serve`` draws what a process on this machine shows.

It serves only this machine, and only URLs that begin with a random token: any program or user of
the machine can reach a port, and the app reads files and runs tools. One tab is open at a time,
since each has a process with its own model. The page may load nothing from other hosts.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import webbrowser
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from localrt import system
from localrt.common.errors import MissingExtraError
from localrt.common.extras import install

try:
    from aiohttp import web
    from textual_serve.app_service import AppService
    from textual_serve.server import Server, to_int
except ImportError as error:
    raise MissingExtraError(
        f"the app in a browser needs textual-serve: {install('browser')}"
    ) from error

if TYPE_CHECKING:
    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HOST = "127.0.0.1"
_GOODBYE_SECONDS = 60.0  # seconds in which an app may save its conversation
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self' 'unsafe-inline' data: blob:; connect-src 'self' ws://{host}; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve_browser(
    command: Sequence[str], *, show: Callable[[str], object] = webbrowser.open
) -> int:
    """Serve the app that ``command`` starts until Ctrl+C; ``show`` gets the URL.

    Returns:
        The process's exit status.
    """
    with socket.create_server((_HOST, 0)) as listening:
        server = TabServer(command, listening.getsockname()[1])
        print(f"localrt: the app is at {server.page} (Ctrl+C ends it)", flush=True)
        show(server.page)
        web.run_app(server.application(), sock=listening, print=None, access_log=None)
    return 0


class TabServer(Server):
    """Serves one tab at a time at ``page``; opening another ends the first."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        # No shell in between: the app watches for the end of this process.
        line = system.REPLACE_SHELL + system.join(command)
        super().__init__(line, host=_HOST, port=port, title="localrt")
        self._token = secrets.token_urlsafe(32)
        self._tab: asyncio.Task[None] | None = None

    @property
    def page(self) -> str:
        """The URL of the app."""
        return f"{self.public_url}/{self._token}/"

    async def application(self) -> web.Application:
        """All routes of ``textual-serve`` below the token."""
        inner = await self._make_app()
        inner.on_startup.clear()  # it prints a banner
        outer = web.Application(middlewares=[self._guard])
        outer.add_subapp(f"/{self._token}", inner)
        # The page requests downloads below the root, with a one-time key of 122 random bits.
        outer.router.add_get("/download/{key}", self.handle_download)
        return outer

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Handle the connection of a tab: start a process for it."""
        before, self._tab = self._tab, asyncio.current_task()
        await _end(before)
        websocket = web.WebSocketResponse(heartbeat=15)
        await websocket.prepare(request)

        async def close() -> None:
            await websocket.close()

        app = AppService(
            self.command,
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=close,
            download_manager=self.download_manager,
        )
        width, height = (to_int(request.query.get(side, ""), 80) for side in ("width", "height"))
        await app.start(width, height)
        try:
            await self._process_messages(websocket, app)
        except asyncio.CancelledError:
            await websocket.close()
        finally:
            await app.stop()
            await _ended(app)
        return websocket

    async def on_shutdown(self, app: web.Application) -> None:
        await _end(self._tab)

    async def handle_download(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super().handle_download(request)
        except web.HTTPNotFound as error:
            raise web.HTTPForbidden from error

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        first = request.path.split("/")[1]
        allowed = hmac.compare_digest(first.encode(), self._token.encode()) or first == "download"
        if not allowed or request.host != f"{_HOST}:{self.port}":
            raise web.HTTPForbidden
        response = await handler(request)
        if not response.prepared:
            for name, value in _HEADERS.items():
                response.headers[name] = value.format(host=request.host)
        return response


async def _ended(app: AppService) -> None:
    """Wait until the app's process has ended: the next one needs its memory."""
    process = app._process
    if process is not None:
        try:
            await asyncio.wait_for(process.communicate(), _GOODBYE_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _end(tab: asyncio.Task[None] | None) -> None:
    """End a tab, and wait until its app has saved everything."""
    if tab is not None and not tab.done():
        tab.cancel()
        await asyncio.wait([tab])
