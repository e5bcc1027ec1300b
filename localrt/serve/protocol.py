"""One connection of the server: uvicorn's HTTP/1.1, with bounds on what a client may leave open.

A request's head has a size and a time, what is no HTTP is answered in JSON, and a refusal reaches
clients that first send all they have. It knows no paths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from localrt.serve.connections import CONNECTION, Connections
from localrt.serve.errors import ApiError, error_body, to_json
from localrt.serve.options import ServeOptions

__all__ = ["HttpProtocol"]

_MOST_DISCARDED = 256 << 20
_SHOWN = 200  # characters of what is wrong


class HttpProtocol(H11Protocol):
    """A connection of ``connections`` that keeps to ``options``.

    A request whose body nobody reads is discarded for a while after its answer: a connection that
    is closed before all has been read is reset, and the client would not see the answer.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
        options: ServeOptions,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.app_state = {**app_state, CONNECTION: self}
        self.conn: _HeadBound = _HeadBound(options.max_header)
        self._known = connections
        self._options = options
        self._timer: asyncio.TimerHandle | None = None
        self._real: asyncio.Transport  # which uvicorn does not close itself
        self._lingering = False
        self._last = False  # no request follows: the server stops
        self._discarded = 0

    # -- the connection ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._real = cast(asyncio.Transport, transport)
        super().connection_made(self._real)
        self.transport = _Transport(self._real, self._close)
        if self._known.join(self, self.client[0] if self.client else ""):
            self._await_request()
        else:
            self.give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._known.leave(self)
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close it at once, and what has not been sent is not."""
        self._real.abort()

    def shutdown(self) -> None:
        """See uvicorn."""
        self._last = True
        if self._running:
            super().shutdown()
        else:
            self._real.close()

    # -- requests ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._lingering or (not self._running and self.conn.their_state is h11.SEND_BODY):
            self._discarded += len(data)
            if self._discarded > _MOST_DISCARDED:
                self.give_up()
                return
        if not self._lingering:
            super().data_received(data)
            self._note_state()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._discarded = 0
        super().on_response_complete()
        if self._running or self.conn.their_state is h11.SEND_BODY:
            self._note_state()
        else:  # uvicorn closes it if no request follows
            self._known.set_busy(self, busy=False)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too much of it."""
        problem = self.conn.problem
        status = 400 if problem is None else problem.error_status_hint
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            msg = f"the request's line and headers are larger than {self._options.max_header} bytes"
        else:
            reason = str(problem).partition(": bytearray")[0][:_SHOWN]
            msg = f"the request is not HTTP/1.1 as this server takes it: {reason}"
        self._refuse(ApiError(status, msg))

    @property
    def _running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _note_state(self) -> None:
        if self.transport.is_closing():
            return
        self._known.set_busy(self, busy=self._running)
        if self._running:
            self._stop_timer()
        elif self._timer is None:
            self._await_request()

    def _await_request(self) -> None:
        """What has begun must have come in time, however slowly it comes."""
        self._timer = self.loop.call_later(self._options.read_timeout_s, self._too_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            limit = self._options.read_timeout_s
            self._refuse(ApiError(408, f"the request's headers did not come within {limit:g} s"))
        else:
            self.give_up()

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        if self._running:  # and waits for what does not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = to_json(error_body(error))
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
            )
            self._real.write("\r\n".join((*head, "", "")).encode("ascii") + body)
        self.conn.send_failed()
        self.transport.close()

    def _close(self) -> None:
        """Close it, once what the client still sends has been read."""
        if self._lingering or self._real.is_closing():
            return
        unread = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if self._last or not unread:
            self._real.close()
            return
        self._lingering = True
        self._discarded = 0
        self._known.set_busy(self, busy=False)
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._timer = self.loop.call_later(self._options.read_timeout_s, self.give_up)
        self.flow.resume_reading()
        with suppress(OSError):  # the client has gone
            self._real.write_eof()


class _HeadBound(h11.Connection):
    """h11's, which also bounds a head that comes in one piece, and remembers what was wrong.

    What proxies read differently is refused: lines that end without a carriage return, and bodies
    with two lengths. A request could hide behind another (request smuggling).
    """

    def __init__(self, most: int) -> None:
        super().__init__(h11.SERVER, most)
        self._most = most
        self.problem: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """See h11."""
        try:
            before = self.trailing_data[0]
            event = super().next_event()
            left = self.trailing_data[0]
            if isinstance(event, h11.Request | h11.EndOfMessage):
                _check_lines(before[: len(before) - len(left)])
            elif event is h11.NEED_DATA:  # the rest of a head, or of a chunk's
                _check_lines(left)
            if isinstance(event, h11.Request):
                if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                    raise h11.RemoteProtocolError(
                        "Content-Length and Transfer-Encoding cannot be combined"
                    )
                lines = sum(len(name) + len(value) + 4 for name, value in event.headers)
                if len(event.method) + len(event.target) + lines > self._most:
                    raise h11.RemoteProtocolError("too large", error_status_hint=431)
        except h11.RemoteProtocolError as error:
            self.problem = error
            raise
        return event


def _check_lines(data: bytes) -> None:
    if data.count(b"\n") != data.count(b"\r\n"):
        raise h11.RemoteProtocolError("a line must end with a carriage return and a line feed")


class _Transport(asyncio.Transport):
    """What uvicorn writes to: its ``close`` is the protocol's."""

    def __init__(self, real: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__()
        self._real, self._close = real, close
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closing():
            self._real.write(data)

    def close(self) -> None:
        self._closed = True
        self._close()

    def is_closing(self) -> bool:
        return self._closed or self._real.is_closing()

    def resume_reading(self) -> None:
        self._real.resume_reading()
