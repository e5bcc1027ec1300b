"""One HTTP request to a server, in its own thread, so that it can be cancelled at once.

The caller checks twenty times a second whether the answer is still wanted; the thread reads a
little ahead, and ends once it is not. Redirects are followed only within the address's own origin,
and no proxy is used. Network failures become one-line errors. It does not know what is requested.
"""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx2

from localrt.client.servers import Address
from localrt.common.closing import Closing
from localrt.common.errors import LocalrtError, reason_of
from localrt.common.formatting import one_line
from localrt.common.network import causes, network_problem

_CONNECT_S = 10.0
_IDLE_S = 600.0  # a long prompt on a streamed model takes minutes
_LOOK_S = 0.05
_AHEAD = 256  # pieces that were read but not taken
_REDIRECTS = 3
_REDIRECTED = (301, 302, 307, 308)
_KEEP_ALIVE = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Exchange(Closing):
    """A running request: ``head`` once, then ``pieces``. A context manager.

    ``look`` is called before every wait and at least every 50 ms during one, or after as many
    seconds as it returns; an exception from it ends the wait.
    """

    def __init__(
        self,
        address: Address,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        look: Callable[[], float | None],
    ) -> None:
        self._address = address
        self._method, self._path, self._body = method, path, body
        self._headers = {**address.headers, **(headers or {})}
        self._look = look
        self._came: queue.Queue[httpx2.Response | bytes | Exception | None] = queue.Queue(_AHEAD)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._answered = False  # whether the head has arrived
        threading.Thread(target=self._run, name="localrt-remote", daemon=True).start()

    def head(self) -> httpx2.Response:
        """Return status and headers; ``pieces`` yields the body.

        Raises:
            LocalrtError: the server cannot be reached, or its answer is not HTTP.
        """
        found = self._next()
        if not isinstance(found, httpx2.Response):
            raise LocalrtError(
                f"{self._address.origin} closed the connection without an HTTP answer"
            )
        self._answered = True
        return found

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            LocalrtError: the connection broke off.
        """
        while isinstance(piece := self._next(), bytes):
            yield piece

    def read(self, limit: int) -> bytes:
        """Return the body, at most ``limit`` bytes of it."""
        found = bytearray()
        for piece in self.pieces():
            found += piece
            if len(found) >= limit:
                break
        return bytes(found[:limit])

    def close(self) -> None:
        """End the request, without waiting for the thread."""
        self._over.set()
        with self._lock:
            if self._socket is not None:
                # A TLS socket's own shutdown would change its state while the thread reads.
                with suppress(OSError):  # it is closed already
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # -- for the waiting thread ------------------------------------------------------------------

    def _next(self) -> httpx2.Response | bytes | None:
        while True:
            wait = self._look()
            try:
                found = self._came.get(timeout=_LOOK_S if wait is None else min(wait, _LOOK_S))
            except queue.Empty:
                continue
            if isinstance(found, Exception):
                line = self._address.hide(_explained(self._address, found, self._answered))
                raise LocalrtError(line) from found
            return found

    # -- the request's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # Reading the certificates takes a tenth of a second.
            tls = ssl.create_default_context() if self._address.scheme == "https" else False
            transport = httpx2.HTTPTransport(
                verify=tls, trust_env=False, socket_options=[_KEEP_ALIVE]
            )
            timeout = httpx2.Timeout(_IDLE_S, connect=_CONNECT_S)
            with httpx2.Client(transport=transport, timeout=timeout, trust_env=False) as client:
                self._ask(client)
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits is told
            self._tell(error)
        else:
            self._tell(None)

    def _ask(self, client: httpx2.Client) -> None:
        address = self._address
        url = httpx2.URL(address.origin + self._path)
        for _ in range(_REDIRECTS + 1):
            with client.stream(
                self._method,
                url,
                content=self._body,
                headers=self._headers,
                extensions={"trace": self._note_socket},
            ) as response:
                location = response.headers.get("location")
                if response.status_code not in _REDIRECTED or location is None:
                    self._tell(response)
                    for piece in response.iter_raw():
                        self._tell(piece)
                    return
            target = _joined(url, location)
            if target is None:
                raise LocalrtError(
                    f"{address.origin} sends requests on to {one_line(location)!r}, where "
                    "nothing was sent: give that address if you trust it"
                )
            url = target
        raise LocalrtError(f"{address.origin} redirects without end: is the address right?")

    def _note_socket(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember the connection's socket, which ``close`` shuts down."""
        connected = event in ("connection.connect_tcp.complete", "connection.start_tls.complete")
        if connected:
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
        if self._over.is_set():
            if connected:  # not yet the client's, which would close it
                info["return_value"].close()
            raise LocalrtError("given up")

    def _tell(self, item: httpx2.Response | bytes | Exception | None) -> None:
        while not self._over.is_set():
            try:
                self._came.put(item, timeout=_LOOK_S)
                return
            except queue.Full:
                continue


def _joined(url: httpx2.URL, location: str) -> httpx2.URL | None:
    """Return the target of ``location``, seen from ``url``; None if its origin differs."""
    try:
        target = url.join(location)
    except httpx2.InvalidURL:
        return None
    same = (target.scheme, target.host, target.port) == (url.scheme, url.host, url.port)
    return target if same else None


def _explained(address: Address, error: Exception, answered: bool) -> str:
    """Return one line about a network failure: what is wrong, and what to do."""
    origin = address.origin
    if isinstance(error, LocalrtError):
        return str(error)
    if answered:
        if isinstance(error, httpx2.TimeoutException):
            return f"nothing came from {origin} for a long time: what came is kept, send again"
        return (
            f"the connection to {origin} broke off in the middle of the answer: what came is kept, "
            "send again"
        )
    if problem := network_problem(error, address.host):
        return problem
    cause = next((each for each in causes(error) if isinstance(each, OSError)), None)
    if isinstance(cause, ssl.SSLError):
        if cause.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            return f"{origin} does not speak TLS: is it http://{address.place}?"
        return f"no TLS connection to {origin}: {one_line(cause.reason or cause, 80)}"
    if isinstance(cause, socket.gaierror):
        return f"there is no host {address.host!r} that the network knows: check the address"
    if isinstance(error, httpx2.TimeoutException):
        return f"{origin} does not answer: is the server up, and reachable from here?"
    if isinstance(cause, ConnectionRefusedError):
        return f"nothing listens at {origin}: start the server, or correct the address"
    if isinstance(cause, ConnectionError) or "disconnected" in str(error):
        return (
            f"{origin} closed the connection without an HTTP answer: does it want https, or http?"
        )
    if isinstance(error, httpx2.ProtocolError):
        return f"{origin} does not speak HTTP: is the address right?"
    if isinstance(cause, OSError):
        return f"{origin} cannot be reached: {one_line(reason_of(cause), 80)}"
    return f"{origin} cannot be asked: {type(error).__name__}: {one_line(error, 80)}"
