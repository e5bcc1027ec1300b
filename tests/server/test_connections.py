"""Connections that say little, too much or no HTTP, and more of them than there is room for."""

from __future__ import annotations

import http.client
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from localrt.server import bodies
from tests.inside import engine_of
from tests.server.conftest import Running, command, connected, serving, status_of
from tests.server.test_bad_input import refused
from tests.waits import wait_for

pytestmark = pytest.mark.timeout(300)

UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
HALF_A_HEAD = b"GET /health HTTP/1.1\r\nHost: "


def answered(port: int, sent: bytes) -> bytes:
    """All that a raw request is answered, until the server has no more."""
    received = b""
    with connected(port, sent) as raw, suppress(ConnectionResetError):
        while piece := raw.recv(1 << 16):
            received += piece
    return received


# -- too many --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_connections_than_open_files(tiny_folder: Path) -> None:
    """Once they are closed the server goes on."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))"
    with command(tiny_folder, before=limited) as (process, port):
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(connected(port))
        assert status_of(port, "/health") == 200
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 0


def test_health_with_too_many_requests(model: Any) -> None:
    with serving(model, max_connections=2) as running, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connected(running.port, UNFINISHED))
        wait_for(lambda: running.request("GET", "/v1/models")[0] == 503)
        error = refused(running.request("GET", "/v1/models"), 503, "try again")
        assert error["code"] == "overloaded"
        assert running.request("GET", "/health")[0] == 200
        assert running.request("GET", "/metrics")[0] == 200
        stack.close()
        wait_for(lambda: running.request("GET", "/v1/models")[0] == 200)


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 65536,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Longer: " + b"y" * 2_000_000,
    ],
    ids=["a header", "more than is read at once"],
)
def test_large_head(server: Running, head: bytes) -> None:
    received = answered(server.port, head + b"\r\n\r\n").lower()
    # By uvicorn or by us; a client that has more to send may only see that it is closed.
    assert received.startswith((b"http/1.1 400 ", b"http/1.1 431 ")) or not received
    assert b"connection: close" in received or not received


@pytest.mark.parametrize(
    "sent",
    [
        b"no http at all\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS
        UNFINISHED.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked") + b"zz\r\n",
    ],
)
def test_invalid_http(server: Running, sent: bytes) -> None:
    assert answered(server.port, sent).startswith(b"HTTP/1.1 400 ")
    assert server.request("GET", "/health")[0] == 200


CHUNKED = UNFINISHED.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    "sent",
    [
        UNFINISHED.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") + b"0\r\n\r\n",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"0\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y\rZ: z\r\n\r\n",
        CHUNKED + b"2\n{}\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y\x00z\r\n\r\n",
        UNFINISHED.replace(b"\r\n\r\n", b"\r\nContent-Length: 8\r\n\r\n") + b"x" * 9,
    ],
)
def test_request_smuggling(server: Running, sent: bytes) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = answered(server.port, sent + hidden)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == received.lower().count(b"connection: close") == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost", 200),
        (b"GET http://localhost HTTP/1.1\r\nHost: localhost", 200),
        (b"HEAD /health HTTP/1.1\r\nHost: localhost", 200),
        (b"GET http://x.example/v1/models HTTP/1.1\r\nHost: localhost", 403),  # the URL counts
    ],
)
def test_forms_of_a_request_line(server: Running, line: bytes, status: int) -> None:
    received = answered(server.port, line + b"\r\nConnection: close\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 %d " % status)


def test_malformed_addresses(server: Running) -> None:
    refused(server.request("GET", "/health", headers={"Host": "[::1"}), 403)
    refused(server.request("GET", "/health", headers={"Origin": "http://[::1"}), 403)


@pytest.mark.parametrize("sent", [b"", HALF_A_HEAD])
def test_heads_that_do_not_come(model: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Their connections are closed, also if they go on sending a little."""
    monkeypatch.setattr("localrt.server.running._KEEP_ALIVE_S", 0.2)
    with serving(model) as served, connected(served.port, sent) as raw:
        raw.settimeout(0.05)
        with suppress(ConnectionError):
            while True:
                with suppress(TimeoutError):
                    assert raw.recv(100) == b""
                    break
                raw.sendall(sent[:1] and b"x")
        assert served.request("GET", "/health")[0] == 200


# -- bodies that nobody reads ----------------------------------------------------------------------


LARGE = 12_000_000


def pieces() -> Iterator[bytes]:
    for _ in range(LARGE // 100_000):
        yield b"x" * 100_000


def test_refusal_of_unread_body(server: Running) -> None:
    url, evil = f"{server.url}/v1/completions", {"Origin": "https://evil.example"}
    for headers, status in (({}, 413), (evil, 403)):
        assert httpx2.post(url, content=pieces(), headers=headers).status_code == status


def test_unread_body_keeps_connection(server: Running) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)) as asking:
        asking.request("POST", "/nothing", b"x" * 100_000)
        assert asking.getresponse().read()
        used = asking.sock
        asking.request("GET", "/health")
        assert asking.getresponse().status == 200
        assert asking.sock is used


def test_room_for_large_bodies(model: Any) -> None:
    with serving(model, max_body=1 << 20) as running, ExitStack() as stack:
        head = UNFINISHED.replace(b"9", str(1 << 20).encode())
        for _ in range(8):  # as many as have room
            raw = stack.enter_context(connected(running.port, head))
            raw.sendall(b" " * ((1 << 20) - 1))
        large = {"prompt": "a", "user": "x" * 900_000, "max_tokens": 1}
        wait_for(lambda: running.service.bodies.taken > 7_700_000)
        refused(running.request("POST", "/v1/completions", large), 503, "large requests")
        assert running.chat(max_tokens=1)[0] == 200
        stack.close()
        wait_for(lambda: running.service.bodies.taken == 0)
        assert running.request("POST", "/v1/completions", large)[0] == 200


# -- panics ----------------------------------------------------------------------------------------


class PanicException(BaseException):
    """As native libraries raise it."""


def panicking(*_: Any, **__: Any) -> Any:
    raise PanicException("index out of bounds")


def test_panic(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in ((server.service.models, "find"), (bodies, "parse_json")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, panicking)
            refused(server.chat(), 500, "PanicException")
        wait_for(lambda: server.log[-1].status == 500)
    with monkeypatch.context() as patch:
        patch.setattr(engine_of(server.model), "extend_batch", panicking, raising=False)
        refused(server.chat(), 500, "PanicException")
        text = server.chat(stream=True)[1]
        assert '"type":"server_error"' in text
    assert server.chat(max_tokens=2)[0] == 200
