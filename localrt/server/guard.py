"""Checks before every endpoint: paths, keys, web pages, limits; also logging and counts.

It is pure ASGI, so that it also handles streams. It does not know bodies.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localrt.server.errors import ApiError, failure
from localrt.server.options import ServeOptions, is_loopback
from localrt.server.service import Service, sent_key

_PREFIX = "v1"


class Paths:
    """Maps a request's path to one of the server's paths, ``known``."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = frozenset(known)
        parts = [path.split("/")[1:] for path in self.known]
        self._under = {names[1] for names in parts if names[0] == _PREFIX and len(names) > 1}
        self._outside = {names[0] for names in parts if names[0] != _PREFIX}

    def meant(self, path: str) -> str:
        """Return the known path: ``//v1/v1/models/`` and ``/models`` become ``/v1/models``,
        ``/v1/api/tags`` becomes ``/api/tags``. In an unknown path only the slashes change.
        """
        names = [name for name in path.split("/") if name]
        prefixed = names[:1] == [_PREFIX]
        while names[:1] == [_PREFIX]:
            del names[0]
        if names and (names[0] in self._under) != (names[0] in self._outside):
            prefixed = names[0] in self._under
        return "/" + "/".join([_PREFIX, *names] if prefixed else names)


# -- the guard -------------------------------------------------------------------------------------


_OPEN = ("/", "/health")  # paths that need no key
_WHEN_FULL = ("/health", "/metrics")
_GONE = 499  # status in the log for a client that disconnected
_LATE = 408
_MOST_DISCARDED = 256 << 20  # most bytes of a refused body to read and discard
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ID_HEADERS = ("x-request-id", "request-id")  # OpenAI's, Anthropic's
# Browsers keep no answer, guess no type, and show none in other sites' pages but with CORS.
_PRIVATE = {b"cache-control": b"no-store", b"x-content-type-options": b"nosniff"}
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogLine:
    """An answered request. ``status`` 499: the client disconnected."""

    client: str
    method: str
    path: str
    status: int
    seconds: float
    request_id: str = ""


class Guard:
    """Passes allowed requests to ``app``; ``log`` is called for every request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        service: Service,
        paths: Iterable[str],
        log: Callable[[LogLine], None] | None,
    ) -> None:
        self._app, self._service, self._log = app, service, log
        self._paths = Paths(paths)
        shared = b"cross-origin" if "*" in service.options.origins else b"same-origin"
        self._headers = _PRIVATE | {b"cross-origin-resource-policy": shared}
        self._answered: ASGIApp = self._answer
        if service.options.origins:  # pages may read error responses, too
            self._answered = CORSMiddleware(
                self._answer,
                allow_origins=service.options.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=[*_ID_HEADERS, "Retry-After"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, whole = time.monotonic(), _GONE, False
        shown, scope = scope["path"], {**scope, "path": self._paths.meant(scope["path"])}
        given = Headers(scope=scope).get(_ID_HEADERS[0], "")
        request_id = given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        body = _Body(scope, receive)

        async def watched(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                own = dict(message.get("headers", ()))
                ours = self._headers | dict.fromkeys(
                    map(str.encode, _ID_HEADERS), request_id.encode()
                )
                added = [(name, value) for name, value in ours.items() if name not in own]
                if message["status"] >= 400 and message["status"] != _LATE:
                    await body.discard(self._service.options.read_timeout_s)
                    added += [] if body.ended else [(b"connection", b"close")]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                whole = True

        self._service.open_requests += 1
        try:
            # Even a preflight request must be unambiguous.
            answer = self._answer if _has_two_lengths(scope) else self._answered
            await answer(scope, body.receive, watched)
        finally:
            self._service.open_requests -= 1
            status = status if whole else _GONE
            self._note(scope, shown, status, time.monotonic() - began, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noticed(message: Message) -> None:
            nonlocal begun
            await send(message)
            begun = True

        try:
            self._check_room(scope)
            _check(scope, self._service.options)
            await self._app(scope, receive, noticed)
        except ClientDisconnect:
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a native library's panic too
            # An answer that has begun cannot become an error: the connection is closed.
            if not begun:
                answer = failure(error).response(scope["path"], Headers(scope=scope))
                await answer(scope, receive, send)
            if isinstance(error, asyncio.CancelledError):
                raise

    def _check_room(self, scope: Scope) -> None:
        """Raise an error if there is no room for another request.

        Raises:
            ApiError: 503.
        """
        if self._service.draining and scope["path"] not in _WHEN_FULL:
            close = {"Connection": "close"}
            raise ApiError(503, "the server is stopping", code="stopping", headers=close)
        most = self._service.options.max_connections
        if scope["path"] not in _WHEN_FULL and self._service.open_requests > most:
            raise ApiError(
                503,
                "too many requests are open: try again later",
                code="overloaded",
                headers={"Connection": "close", "Retry-After": "1"},
            )

    def _note(self, scope: Scope, uri: str, status: int, seconds: float, request_id: str) -> None:
        path = scope["path"]
        known = path if path in self._paths.known else "other"
        for_model = known.startswith(("/v1/", "/api/")) and scope["method"] == "POST"
        self._service.count(known, status, seconds if for_model else None)
        if self._log is not None:
            client = scope["client"][0] if scope.get("client") else "-"
            shown = uri.encode("unicode_escape").decode()[:200]
            with suppress(OSError):  # the log's reader is gone
                self._log(LogLine(client, scope["method"], shown, status, seconds, request_id))


class _Body:
    """A request's body. Before a refusal is sent, the unread rest is read and discarded: otherwise
    a client that sends its whole body first would find the connection reset, and miss the answer.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.ended = "expect" in Headers(scope=scope)  # such a client waits before it sends

    async def receive(self) -> Message:
        """See ASGI."""
        message = await self._receive()
        self.ended |= not message.get("more_body", False)
        return message

    async def discard(self, seconds: float) -> None:
        """Read the rest, up to limits of time and size."""
        left = _MOST_DISCARDED
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.ended and left > 0:
                    left -= len((await self.receive()).get("body", b""))


def _check(scope: Scope, options: ServeOptions) -> None:
    """Raise an error unless the request is allowed.

    Raises:
        ApiError: 400, 401, 403 or 431.
    """
    headers = Headers(scope=scope)
    _check_head(scope, options)
    if options.api_key is None:  # a page would not have the key
        _check_page(scope, headers, options)
    preflight = scope["method"] == "OPTIONS" and "origin" in headers
    if options.api_key is not None and scope["path"] not in _OPEN and not preflight:
        given = sent_key(headers).encode()
        if not hmac.compare_digest(given, options.api_key.strip().encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY, or x-api-key",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _has_two_lengths(scope: Scope) -> bool:
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}


def _check_head(scope: Scope, options: ServeOptions) -> None:
    """Refuse heads that proxies may interpret differently, and close the connection, in which a
    second request could be hidden.
    """
    close, most = {"Connection": "close"}, options.max_header
    if _has_two_lengths(scope):
        message = "Content-Length and Transfer-Encoding cannot be combined"
        raise ApiError(400, message, headers=close)
    if any(_CONTROL.search(value) for _, value in scope["headers"]):
        raise ApiError(400, "a header contains a control character", headers=close)
    line = len(scope["raw_path"]) + len(scope["query_string"])
    if line + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > most:
        message = f"the request's line and headers are larger than {most} bytes"
        raise ApiError(431, message, headers=close)


def _check_page(scope: Scope, headers: Mapping[str, str], options: ServeOptions) -> None:
    """Refuse web pages, which could reach a server on this machine through a browser.

    A browser sends the page's origin, and the name by which it reaches this server. If that is not
    a name of this machine, the page's DNS name points here (DNS rebinding). Where it sends no
    origin, as for pictures, whose times a page can take, it says whether the page is of this site.
    A link of another site may open the chat page.
    """
    host = headers.get("host", "")
    name = _split(f"//{host}").hostname if "@" not in host else ""
    if host and is_loopback(options.host) and not is_loopback(name or ""):
        raise ApiError(
            403,
            f"Host {host[:200]!r} refused: without a key this server accepts localhost only. "
            "Behind a reverse proxy, start it with --api-key",
        )
    origin = headers.get("origin")
    if "*" in options.origins or origin in options.origins:
        return
    if origin is None:
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        opens = scope["path"] == "/" and headers.get("sec-fetch-dest") == "document"
        if foreign and not opens:
            raise ApiError(403, "pages of other sites are refused: name them with --cors")
        return
    if not host or _split(origin).netloc.lower() != host.lower():
        raise ApiError(
            403,
            f"pages of {origin[:200]!r} are refused: start the server with --cors {origin[:200]}",
        )


def _split(url: str) -> SplitResult:
    """Return the parts of a URL; they are empty if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
