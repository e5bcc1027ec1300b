"""One HTTP request to a server, made in a thread of its own, so that giving it up takes no time.

Whoever waits looks up twenty times a second; the thread reads ahead by little, and ends when nobody
waits any more. Redirections are followed within the address's own origin only, and no proxy is
asked. Failures of the network become one line here. It does not know what is asked.
"""

from __future__ import annotations

import http.client
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from localrt.closing import Closing
from localrt.errors import LocalrtError
from localrt.remote.address import Address, shown

__all__ = ["Exchange", "Head"]

_CONNECT_S = 10.0
_IDLE_S = 600.0  # a long prompt on a streamed model takes minutes
_LOOK_S = 0.05
_PIECE = 1 << 16
_AHEAD = 256  # pieces that are read and not yet taken
_MOVES = 3
_MOVED = (301, 302, 307, 308)


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer begins with; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]


class Exchange(Closing):
    """A request on its way: ``head`` once, then ``pieces``. A context manager.

    ``look`` is called before every wait and at least every 50 ms while waiting; what it raises ends
    the wait.
    """

    def __init__(
        self,
        address: Address,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        look: Callable[[], None] = lambda: None,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._address = address
        self._method, self._path, self._body = method, path, body
        self._look, self._idle_s = look, idle_s
        self._came: queue.Queue[Head | bytes | Exception | None] = queue.Queue(_AHEAD)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._answered = False  # whether the head came
        self._thread = threading.Thread(target=self._run, name="localrt-remote", daemon=True)
        self._thread.start()

    def head(self) -> Head:
        """Status and headers.

        Raises:
            LocalrtError: the server cannot be reached, or does not answer as one.
        """
        found = self._next()
        if not isinstance(found, Head):
            raise LocalrtError(f"{self._address.origin} closed the connection without an answer")
        self._answered = True
        return found

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes.

        Raises:
            LocalrtError: the connection broke off.
        """
        while isinstance(piece := self._next(), bytes):
            yield piece

    def read(self, limit: int) -> bytes:
        """The body, at most ``limit`` bytes of it."""
        found = bytearray()
        for piece in self.pieces():
            found += piece
            if len(found) >= limit:
                break
        return bytes(found[:limit])

    def close(self) -> None:
        """Nobody waits any more; does not wait either."""
        self._over.set()
        with self._lock:
            if self._socket is not None:
                # A TLS socket's own shutdown would take its state from the thread that reads.
                try:
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                except OSError:  # it is closed already
                    pass

    # -- the side that waits ---------------------------------------------------------------------

    def _next(self) -> Head | bytes | None:
        while True:
            self._look()
            try:
                found = self._came.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(found, Exception):
                line = self._address.hide(_explained(self._address, found, self._answered))
                raise LocalrtError(line) from found
            return found

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits is told
            self._tell(error)
        else:
            self._tell(None)

    def _ask(self) -> None:
        path = self._path
        for _ in range(_MOVES + 1):
            connection = self._connected()
            try:
                if self._over.is_set():
                    return
                try:
                    connection.request(self._method, path, self._body, self._address.headers)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # refused before it was all sent: the answer says why
                answer = connection.getresponse()
                location = answer.getheader("Location")
                if answer.status not in _MOVED or location is None:
                    self._hand_on(answer)
                    return
                moved = self._address.moved(path, location)
                if moved is None:
                    raise LocalrtError(
                        f"{self._address.origin} sends requests on to {shown(location)!r}, where "
                        "nothing was sent: give that address if you trust it"
                    )
                path = moved
            finally:
                with self._lock:
                    self._socket = None
                connection.close()
        raise LocalrtError(f"{self._address.origin} redirects without end: is the address right?")

    def _connected(self) -> http.client.HTTPConnection:
        address = self._address
        connection: http.client.HTTPConnection
        if address.scheme == "https":
            connection = http.client.HTTPSConnection(
                address.host,
                address.port,
                timeout=_CONNECT_S,
                context=ssl.create_default_context(),
            )
        else:
            connection = http.client.HTTPConnection(address.host, address.port, timeout=_CONNECT_S)
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sock.settimeout(self._idle_s)
        with self._lock:
            self._socket = connection.sock
        return connection

    def _hand_on(self, answer: http.client.HTTPResponse) -> None:
        headers = {name.lower(): value for name, value in answer.getheaders()}
        self._tell(Head(answer.status, headers))
        while not self._over.is_set() and (piece := answer.read1(_PIECE)):
            self._tell(piece)
        if answer.length:  # an answer that says how long it is, and is shorter
            raise http.client.IncompleteRead(b"", answer.length)

    def _tell(self, item: Head | bytes | Exception | None) -> None:
        while not self._over.is_set():
            try:
                self._came.put(item, timeout=_LOOK_S)
                return
            except queue.Full:
                continue


def _explained(address: Address, error: Exception, answered: bool) -> str:
    """One line about a failure of the network: what is wrong, what to do."""
    origin = address.origin
    if isinstance(error, LocalrtError):
        return str(error)
    if answered:
        if isinstance(error, TimeoutError):
            return f"nothing came from {origin} for a long time: what came is kept, send again"
        return (
            f"the connection to {origin} broke off in the middle of the answer: what came is kept, "
            "send again"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {address.host} is not trusted ({shown(error.verify_message, 80)}):"
            " for an authority of your own set SSL_CERT_FILE to its certificate"
        )
    if isinstance(error, ssl.SSLError):
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            return f"{origin} does not speak TLS: is it http://{address.place}?"
        return f"no TLS connection to {origin}: {shown(error.reason or error, 80)}"
    if isinstance(error, socket.gaierror):
        return f"there is no host {address.host!r} that the network knows: check the address"
    if isinstance(error, TimeoutError):
        return f"{origin} does not answer: is the server up, and reachable from here?"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {origin}: start the server, or correct the address"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionError):
        return f"{origin} closed the connection without an answer: does it want https, or http?"
    if isinstance(error, http.client.HTTPException):
        return f"{origin} does not speak HTTP: is the address right?"
    if isinstance(error, OSError):
        return f"{origin} cannot be reached: {shown(error.strerror or error, 80)}"
    return f"{origin} cannot be asked: {type(error).__name__}: {shown(error, 80)}"
