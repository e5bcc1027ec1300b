"""One request to a server, streamed and timed.

It runs in the thread of its session; ``Client.cancel`` ends all requests from another thread.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from localrt.bench.mix.apps import Request
from localrt.client.answer import events, refusal
from localrt.client.servers import Address
from localrt.common.errors import LocalrtError
from localrt.common.formatting import one_line

CLASS_HEADER = "X-Localrt-Class"
_PIECE = 1 << 16
_IDLE_S = 600.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where an application's requests go, and what the model is called there."""

    address: Address
    model: str


@dataclass(slots=True)
class Reply:
    """What came of a request; times in seconds since it was sent.

    ``tokens`` are the server's own count, or where it sends none, the pieces of the answer.
    ``cancelled``: given up as planned.
    """

    text: str = ""
    at: list[float] = field(default_factory=list)  # of each piece of text
    end_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int | None = None
    cancelled: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """The time to the first piece of text."""
        return self.at[0] if self.at else None

    @property
    def tpot_s(self) -> float | None:
        """The mean time per token after the first."""
        return (self.at[-1] - self.at[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def stalls(self, longest_s: float) -> int:
        """Count the gaps between pieces that are longer."""
        return sum(b - a > longest_s for a, b in pairwise(self.at))


class Client:
    """Sends requests, each on a connection of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._cancelled: str | None = None

    def cancel(self, why: str) -> None:
        """End all requests, with ``why`` as their error; later ones too."""
        with self._lock:
            self._cancelled = self._cancelled or why
            for each in self._open:
                with suppress(OSError):  # TLS's own shutdown would disturb the reading thread
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    def send(self, place: Place, request: Request, class_: str) -> Reply:
        """Send one request and read its answer; failures are in ``Reply.error``."""
        reply = Reply()
        started = time.perf_counter()
        try:
            with closing(_connection(place.address)) as connection:
                self._send(connection, place, request, class_, reply, started)
        except TimeoutError:
            reply.cancelled = request.give_up_s is not None
            reply.error = None if reply.cancelled else "nothing came for a long time"
        except (OSError, http.client.HTTPException, LocalrtError) as error:
            reply.error = self._cancelled or one_line(str(error) or type(error).__name__)
        except (ValueError, TypeError, AttributeError):
            reply.error = f"{place.address.origin} does not speak OpenAI's protocol"
        reply.end_s = time.perf_counter() - started
        return reply

    def _send(
        self,
        connection: http.client.HTTPConnection,
        place: Place,
        request: Request,
        class_: str,
        reply: Reply,
        started: float,
    ) -> None:
        address = place.address
        connection.connect()
        # The response takes the connection's socket over, so it is kept here.
        sock = connection.sock
        with self._lock:
            self._open.add(sock)
        try:
            if self._cancelled:
                raise LocalrtError(self._cancelled)
            headers = {**address.headers, CLASS_HEADER: class_}
            body = json.dumps({"model": place.model, **request.body}).encode()
            connection.request("POST", address.base + request.path, body, headers)
            limit = None if request.give_up_s is None else started + request.give_up_s
            _wait_until(sock, limit)
            with closing(connection.getresponse()) as response:
                if response.status != 200:
                    head = {name.lower(): value for name, value in response.getheaders()}
                    raise refusal(address, response.status, head, response.read(_PIECE))
                if not request.body.get("stream"):
                    _take(json.loads(response.read()), reply, started)
                    return
                ended = False
                for event in events(_pieces(response, sock, limit), address):
                    ended = event is None
                    if event is not None:
                        _take(event, reply, started)
                if not ended:
                    raise LocalrtError("the connection broke off in the middle of the answer")
        finally:
            with self._lock:
                self._open.discard(sock)


def _connection(address: Address) -> http.client.HTTPConnection:
    secure = address.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    return kind(address.host, address.port, timeout=_IDLE_S)


def _wait_until(sock: socket.socket, limit: float | None) -> None:
    """Let reads fail at ``limit``.

    Raises:
        TimeoutError: it is past.
    """
    if limit is not None:
        left = limit - time.perf_counter()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)


def _pieces(
    response: http.client.HTTPResponse, sock: socket.socket, limit: float | None
) -> Iterator[bytes]:
    while piece := response.read1(_PIECE):
        yield piece
        _wait_until(sock, limit)


def _take(event: Mapping[str, Any], reply: Reply, started: float) -> None:
    """Add an event of a stream, or a whole answer without text."""
    if error := event.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise LocalrtError(one_line(message or "the server failed"))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        parts = (delta.get("reasoning_content"), delta.get("content"), choice.get("text"))
        if text := "".join(part for part in parts if part):
            reply.at.append(time.perf_counter() - started)
            reply.text += text
            reply.tokens = max(reply.tokens, len(reply.at))
    if usage := event.get("usage"):
        reply.prompt_tokens = usage.get("prompt_tokens")
        reply.tokens = usage.get("completion_tokens") or reply.tokens
