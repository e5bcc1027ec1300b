"""A server on this machine that answers exactly what a test says, byte for byte."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, BinaryIO

from localrt import system

__all__ = [
    *("DONE", "HEAD", "MOST", "Asked", "Fake", "answer_head", "delta", "endless", "event", "fake"),
    *("listed", "nobody", "saying", "whole"),
]


@contextmanager
def nobody() -> Iterator[int]:
    """A port at which nothing listens: no other program gets it while the block runs, but a server
    that is started for it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        if system.IS_WINDOWS:  # gives a port to one socket alone
            held.close()
        yield port


class Asked:
    """A request that came."""

    def __init__(self, head: str, reader: BinaryIO) -> None:
        self.line, *lines = head.split("\r\n")
        self.path = self.line.split(" ")[1]
        self.headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        body = reader.read(int(self.headers.get("content-length", 0)))
        self.body = json.loads(body) if body else None


class Fake:
    """``answer`` gets the request and the connection; what it returns is sent, if anything."""

    def __init__(self, answer: Callable[[Asked, socket.socket], bytes | None]) -> None:
        self.asked: list[Asked] = []
        self.context: ssl.SSLContext | None = None
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._connections: list[socket.socket] = []
        self.over = threading.Event()
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.over.set()
        for each in (self._listening, *self._connections):
            with suppress(OSError):  # not everywhere does this wake who waits
                each.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(20)
            if self.context is not None:
                connection = self.context.wrap_socket(connection, server_side=True)
            with connection.makefile("rb") as reader:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = reader.readline()
                    if not line:
                        return
                    head += line
                asked = Asked(head.decode().removesuffix("\r\n\r\n"), reader)
            self.asked.append(asked)
            reply = self._answer(asked, connection)
            if reply is not None:
                connection.sendall(reply)
        except OSError:
            pass
        finally:
            connection.close()


@contextmanager
def fake(answer: Callable[[Asked, socket.socket], bytes | None]) -> Iterator[Fake]:
    running = Fake(answer)
    try:
        yield running
    finally:
        running.close()


def whole(status: int, body: Any = b"", kind: str = "application/json", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Said", f"Content-Type: {kind}", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def listed(*names: str, **more: Any) -> bytes:
    return whole(200, {"object": "list", "data": [{"id": name, **more} for name in names]})


MOST = 1 << 20  # bytes that tests of limits let be read


def endless(piece: bytes, head: bytes = b"") -> Callable[[Asked, socket.socket], None]:
    """Sends this again and again, but no more than three times what may be read."""

    def answer(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(0, 3 * MOST, len(piece)):
            connection.sendall(piece)

    return answer


def answer_head(kind: str, status: int = 200, **headers: str) -> bytes:
    """The head of an answer that ends with its connection."""
    lines = [f"HTTP/1.1 {status} Said", f"Content-Type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def delta(reason: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])


def saying(
    reply: bytes | Callable[[Asked, socket.socket], bytes | None],
) -> AbstractContextManager[Fake]:
    """Lists one model and answers chats with ``reply``."""

    def answer(asked: Asked, connection: socket.socket) -> bytes | None:
        if asked.path.endswith("/models"):
            return listed("m")
        return reply(asked, connection) if callable(reply) else reply

    return fake(answer)
