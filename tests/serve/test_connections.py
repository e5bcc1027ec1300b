"""Connections that say little, too much or no HTTP, and more of them than there is room for."""

from __future__ import annotations

import errno
import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest

from localrt.serve import bodies, protocol
from localrt.serve.app import create_app
from localrt.serve.connections import Connections, most_connections
from localrt.serve.options import ServeOptions
from localrt.serve.server import Server
from tests.inside import engine_of
from tests.serve.conftest import Running, serving
from tests.serve.test_bad_input import refused
from tests.waits import wait_for

pytestmark = pytest.mark.timeout(300)

UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
HALF_A_HEAD = b"GET /health HTTP/1.1\r\nHost: "


def connected(port: int, sent: bytes = b"") -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", port), timeout=120)
    raw.sendall(sent)
    return raw


def exchanged(port: int, sent: bytes) -> tuple[int, Any, bytes]:
    """Status, JSON and head of what a raw request is answered, until the server has no more."""
    with connected(port, sent) as raw, raw.makefile("rb") as reader:
        return read_answer(reader.read())


def read_answer(received: bytes) -> tuple[int, Any, bytes]:
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body), head.lower()


# -- too many --------------------------------------------------------------------------------------


def test_idle_connections_make_room_for_new_ones(model: Any) -> None:
    with serving(model, max_connections=4) as running, ExitStack() as stack:
        idle = [
            stack.enter_context(connected(running.port, HALF_A_HEAD if number % 2 else b""))
            for number in range(60)
        ]
        assert running.request("GET", "/health")[0] == 200
        assert len(running.service.connections) <= 4 + 16 + 1
        assert idle[0].recv(100) == b""
        assert running.chat(max_tokens=2)[0] == 200


def test_health_is_told_when_every_connection_is_busy(model: Any) -> None:
    with serving(model, max_connections=2) as running, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connected(running.port, UNFINISHED))
        stack.enter_context(connected(running.port, HALF_A_HEAD))
        wait_for(lambda: running.request("GET", "/v1/models")[0] == 503)
        error = refused(running.request("GET", "/v1/models"), 503, "try again")
        assert error["code"] == "overloaded"
        assert running.request("GET", "/health")[0] == 200
        assert running.request("GET", "/metrics")[0] == 200
        stack.close()
        wait_for(lambda: running.request("GET", "/v1/models")[0] == 200)


class Peer:
    def __init__(self) -> None:
        self.open = True

    def give_up(self) -> None:
        self.open = False


def test_another_machine_gets_half() -> None:
    known = Connections(100)
    local, remote = [Peer() for _ in range(40)], [Peer() for _ in range(80)]
    for one in local:
        assert known.join(one, "127.0.0.1")
    for number, one in enumerate(remote):  # in one network, as one client has it
        assert known.join(one, f"2001:db8::{number:x}")
    assert all(one.open for one in local)
    assert [one.open for one in remote] == [False] * (80 - 66) + [True] * 66
    for one in remote[-66:]:
        known.set_busy(one, busy=True)
    assert sum(map(known.crowded, remote)) == 16
    assert not known.join(Peer(), "2001:db8::1")
    for one in remote[-20:]:
        known.leave(one)
    assert sum(map(known.crowded, remote)) == 0
    known.set_busy(local[0], busy=True)
    assert not known.crowded(local[0])
    assert len(known) == 40 + 66 - 20


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_this_machine_gets_all(host: str) -> None:
    known, peers = Connections(10), [Peer() for _ in range(10)]
    for one in peers:
        assert known.join(one, host)
        known.set_busy(one, busy=True)
    assert not any(map(known.crowded, peers))


def test_the_last_places_are_taken_by_nobody_else() -> None:
    known = Connections(2)
    peers = [Peer() for _ in range(18)]
    for one in peers:
        assert known.join(one, "127.0.0.1")
        known.set_busy(one, busy=True)
    assert not known.join(Peer(), "127.0.0.1")
    assert not known.make_room()
    known.set_busy(peers[3], busy=False)
    assert known.join(Peer(), "127.0.0.1")
    assert [one.open for one in peers].index(False) == 3


def test_open_files_bound_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, low, high in ((1 << 20, 1000, 1000), (2048, 700, 1000), (256, 8, 180), (8, 8, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        monkeypatch.setattr(Path, "iterdir", lambda _: iter(range(20)))
        assert low <= most_connections(1000) <= high
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert most_connections(1000) == 1000


def test_a_process_with_few_open_files_goes_on_and_is_silent(tiny_folder: Path) -> None:
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160));"
        "from localrt.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", limited, "serve", str(tiny_folder)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json", "--max-connections", "150"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process, ExitStack() as stack:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["url"].split(":")[2].split("/")[0])
        for _ in range(400):
            stack.enter_context(connected(port))
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as asking:
            asking.request("GET", "/health")
            assert asking.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 0


def test_no_open_file_left_closes_an_idle_connection(model: Any) -> None:
    app, idle, loop = create_app(model), Peer(), Mock()
    assert app.state.service.connections.join(idle, "127.0.0.1")
    failed = {"exception": OSError(errno.EMFILE, "too many open files")}
    Server(app, ServeOptions())._unexpected(loop, failed)
    assert not idle.open
    assert not loop.mock_calls


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 65536,
        b"GET /health HTTP/1.1\r\nHost: localhost" + b"\r\nX: y" * 9000,
        b"GET /" + b"u" * 60000 + b" HTTP/1.1\r\nHost: localhost",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Longer: " + b"y" * 2_000_000,
    ],
    ids=["a header", "many headers", "a long URL", "more than is read at once"],
)
def test_a_large_head_is_refused_however_it_comes(server: Running, head: bytes) -> None:
    status, body, found = exchanged(server.port, head + b"\r\n\r\n")
    refused((status, body, {}), 431, "32768 bytes")
    assert b"connection: close" in found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"no http at all\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (UNFINISHED.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked") + b"zz\r\n", 400),
    ],
)
def test_what_is_no_http_is_told_in_json(server: Running, sent: bytes, status: int) -> None:
    got, body, _ = exchanged(server.port, sent)
    refused((got, body, {}), status, "not HTTP/1.1")
    assert server.request("GET", "/health")[0] == 200


CHUNKED = UNFINISHED.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    "sent",
    [
        UNFINISHED.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") + b"0\r\n\r\n",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"0\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y\rZ: z\r\n\r\n",
        CHUNKED + b"2\n{}\r\n0\r\n\r\n",
        CHUNKED + b"2;a\nb\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"2\r\n{}\n0\r\n\r\n",
        CHUNKED + b"2\r\n{}\r\n0\n\n",
        CHUNKED + b"2\r\n{}\r\n0\r\n\n",
        CHUNKED + b"2\r\n{}\r\n0\r\nX: y\n\r\n",
    ],
)
def test_what_a_proxy_may_read_differently_is_refused_and_closed(
    server: Running, sent: bytes
) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(server.port, sent + hidden) as sock, sock.makefile("rb") as reader:
        received = reader.read()
    status, body, _ = read_answer(received)
    refused((status, body, {}), 400)
    assert received.count(b"content-length:") == 1


def test_chunks_with_extensions_and_trailers_are_read(server: Running) -> None:
    sent = CHUNKED + b'2;a="b"\r\n{}\r\n0;c\r\nX: y\r\n\r\n'
    status, body, _ = exchanged(server.port, sent.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    refused((status, body, {}), 400, "must have")


def test_heads_must_come_in_time(model: Any) -> None:
    # Long enough for a slow machine to send half a head; all three run out together.
    with serving(model, read_timeout_s=1.5) as running, ExitStack() as stack:
        half = stack.enter_context(connected(running.port, HALF_A_HEAD))
        silent = stack.enter_context(connected(running.port))
        kept = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
        stack.callback(kept.close)
        kept.request("GET", "/health")
        assert kept.getresponse().read()
        kept.sock.sendall(HALF_A_HEAD)
        for late in (half, kept.sock):
            with late.makefile("rb") as reader:
                status, body, _ = read_answer(reader.read())
            refused((status, body, {}), 408, "1.5 s")
        assert silent.recv(100) == b""
        wait_for(lambda: len(running.service.connections) == 0)


def test_addresses_that_are_none(server: Running) -> None:
    refused(server.request("GET", "/health", headers={"Host": "[::1"}), 403)
    refused(server.request("GET", "/health", headers={"Origin": "http://[::1"}), 403)


# -- bodies that nobody reads ----------------------------------------------------------------------


LARGE = 40_000_000


def pieces() -> Iterator[bytes]:
    for _ in range(LARGE // 100_000):
        yield b"x" * 100_000


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}], ids=["kept", "closed"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_refusal_is_seen_by_who_sends_all_first(
    server: Running, model: Any, headers: dict[str, str], chunked: bool
) -> None:
    path, body = "/v1/completions", pieces() if chunked else b"x" * LARGE
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)) as asking:
        asking.request("POST", path, body, headers, encode_chunked=chunked)
        assert asking.getresponse().status == 413
    content = pieces() if chunked else b"x" * LARGE
    assert httpx2.post(server.url + path, content=content, headers=headers).status_code == 413
    evil = {**headers, "Origin": "https://evil.example"}
    content = pieces() if chunked else b"x" * LARGE
    assert httpx2.post(server.url + path, content=content, headers=evil).status_code == 403


def test_what_is_discarded_is_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MOST_DISCARDED", 1_000_000)
    for path in (b"/v1/completions", b"/nothing"):
        head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
        with connected(server.port, head) as raw, pytest.raises(ConnectionError):
            raw.sendall(b"x" * 90_000_000)


def test_a_short_body_that_nobody_reads_leaves_the_connection(server: Running) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)) as asking:
        asking.request("POST", "/nothing", b"x" * 100_000)
        assert asking.getresponse().read()
        used = asking.sock
        asking.request("GET", "/health")
        assert asking.getresponse().status == 200
        assert asking.sock is used


def test_large_bodies_that_do_not_end_are_bounded_together(model: Any) -> None:
    with serving(model, max_body=1 << 20) as running, ExitStack() as stack:
        head = UNFINISHED.replace(b"9", str(1 << 20).encode())
        for _ in range(12):
            raw = stack.enter_context(connected(running.port, head))
            raw.sendall(b" " * ((1 << 20) - 1))
        large = {"prompt": "a", "user": "x" * 900_000, "max_tokens": 1}
        wait_for(lambda: running.service.bodies._taken > 7 << 20)
        refused(running.request("POST", "/v1/completions", large), 503, "large requests")
        assert running.chat(max_tokens=1)[0] == 200
        stack.close()
        wait_for(lambda: running.service.bodies._taken == 0)
        assert running.request("POST", "/v1/completions", large)[0] == 200


# -- panics ----------------------------------------------------------------------------------------


class PanicException(BaseException):
    """As native libraries raise it."""


def panicking(*_: Any, **__: Any) -> Any:
    raise PanicException("index out of bounds")


def test_a_panic_is_an_error_of_the_server(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in ((server.service.models, "find"), (bodies, "check_fields")):
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
