"""The server as a process: socket, uvicorn, signals, and a graceful shutdown.

It knows nothing about models or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from localrt import system
from localrt.api import Model
from localrt.common.errors import LocalrtError, reason_of
from localrt.common.processes import port_holder
from localrt.server.app import create_app
from localrt.server.guard import LogLine
from localrt.server.models import Models
from localrt.server.options import ServeOptions

# -- strict HTTP -----------------------------------------------------------------------------------


class StrictHttp(H11Protocol):
    """A connection that accepts only strict HTTP/1.1 heads and trailers. It is closed if no request
    has begun ``timeout_keep_alive`` seconds after the connection was made, or the last answer sent.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: h11.Connection = _StrictConnection(
            h11.SERVER, self.config.h11_max_incomplete_event_size or 16 << 10
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """See asyncio. uvicorn's own ends the timer at the first byte of a head."""
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        before = self.cycle
        super().data_received(data)
        if timer is not None and self.cycle is before:
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio. uvicorn's own keeps the timer, and thereby itself, if there was an error."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()


class _StrictConnection(h11.Connection):
    def next_event(self) -> Any:
        """See h11."""
        before = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage):
            read = before[: len(before) - len(self.trailing_data[0])]
            if read.count(b"\n") != read.count(b"\r\n"):
                raise h11.RemoteProtocolError("a line must end with a carriage return")
        return _by_path(event) if isinstance(event, h11.Request) else event


def _by_path(request: h11.Request) -> h11.Request:
    """Return a request by path and Host, also if its line has a URL (RFC 9112, 3.2.2)."""
    if (url := re.fullmatch(rb"(?i:https?)://([^/?]+)(.*)", request.target)) is None:
        return request
    headers = [each for each in request.headers if each[0] != b"host"]
    return h11.Request(
        method=request.method,
        headers=[*headers, (b"host", url[1])],
        target=b"/" + url[2].removeprefix(b"/"),
        http_version=request.http_version,
    )


# -- the process -----------------------------------------------------------------------------------


_BACKLOG = 1024
_OPEN_FILES = 1 << 16  # no more, since some programs iterate over all possible descriptors
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REASONS = {errno.EADDRNOTAVAIL: "this machine does not have this address"}
_SEND_BUFFER = 256 << 10
_KEEP_ALIVE_S = 30
_DRAIN_STEP_S = 0.05
_LAST_WORDS_S = 0.2  # seconds for answers that a second signal ends
_AFTER_DRAIN_S = 5  # seconds to report answers that were cut off


def open_socket(options: ServeOptions) -> socket.socket:
    """Return a bound socket, before a model is loaded, so that a port in use is known at once.

    Raises:
        LocalrtError: the port is in use, or the address is not this machine's.
    """
    host, port = options.host.strip("[]"), options.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Prefer localhost's IPv4 address.
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        bound = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except socket.gaierror as error:
        raise LocalrtError(f"cannot listen on {host}: {reason_of(error)}") from error
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or os.strerror(error.errno or 0)
        if error.errno == errno.EADDRINUSE:
            holder = port_holder(port)
            by = f" by {holder}" if holder else ""
            reason = f"the port is in use{by}: choose another with --port"
        raise LocalrtError(f"cannot listen on {host}:{port}: {reason}") from error
    # Connections inherit these options, which limit the data buffered for a client that does not
    # read and the time until such a connection is dropped, and detect dead clients.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        timeout = max(1, int(options.write_timeout_s * 1000))
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
    return bound


def serve(
    model: Model | Models,
    options: ServeOptions,
    *,
    bound: socket.socket | None = None,
    log: Callable[[LogLine], None] | None = None,
    note: Callable[[str], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve ``model``, or several, until SIGINT or SIGTERM; ``on_ready`` gets the server's URL.

    Running answers may finish for ``options.drain_s``; a second SIGINT ends them at once.

    Raises:
        LocalrtError: the address cannot be listened on.
    """
    system.allow_open_files(_OPEN_FILES)
    bound = bound or open_socket(options)
    host, port = bound.getsockname()[:2]
    app = create_app(model, options, log=log, note=note)
    server = Server(app, options)
    if on_ready is not None:
        shown = f"[{host}]" if ":" in host else host
        server.ready = lambda: on_ready(f"http://{shown}:{port}")
    with contextlib.closing(bound):
        server.run(sockets=[bound])


class Server(uvicorn.Server):
    """uvicorn's server, but it ends quietly and cancels answers that exceed the drain time."""

    def __init__(self, app: Starlette, options: ServeOptions) -> None:
        # The server's own log line has everything about a request.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        super().__init__(
            uvicorn.Config(
                app,
                http=StrictHttp,
                h11_max_incomplete_event_size=options.max_header,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(options.drain_s) + _AFTER_DRAIN_S,
                backlog=_BACKLOG,
            )
        )
        self._app = app
        self._options = options
        self.ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        asyncio.get_running_loop().set_exception_handler(self._unexpected)
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers finish for a limited time, while new requests are refused."""
        loop, service = asyncio.get_running_loop(), self._app.state.service
        timer = loop.call_later(self._options.drain_s, service.stop)
        cutting = loop.create_task(self._cut())
        service.draining = True
        if service.open_requests:
            service.note_once("draining", "answers are finishing: Ctrl+C again ends them")
        try:
            # A conversation's answer goes on without a request.
            while (service.open_requests or service.open_answers) and not (
                self.force_exit or service.stopping
            ):
                await asyncio.sleep(_DRAIN_STEP_S)
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            cutting.cancel()

    async def _cut(self) -> None:
        """Drop the connections at a second signal: from Python 3.12 on, asyncio waits for them."""
        while not self.force_exit:
            await asyncio.sleep(_DRAIN_STEP_S)
        await asyncio.sleep(_LAST_WORDS_S)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        # asyncio retries accepting within a second; uvicorn closes connections that are not HTTP.
        no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
        closed = isinstance(error, ValueError) and self.should_exit  # it retries all the same
        if not (no_room or closed or isinstance(error, h11.ProtocolError)):
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but a handled signal is not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = system.STOP_SIGNALS
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the first signal, stop when answers have finished; on the second, at once."""
        if self.should_exit:
            self.force_exit = True
            self._app.state.service.stop()
        self.should_exit = True
