"""Servers of the official SDK over stdio and HTTP: tools, calls, failures, ends."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrt.mcp import connection
from localrt.mcp.config import ServerConfig, ServerStatus, Tool, ToolResult
from localrt.mcp.servers import ToolServers
from tests.fake_endpoint import MOST, Asked, answer_head, endless, fake, nobody
from tests.waits import wait_for

NO_PROGRAM = "no program in PATH, nor an absolute path to one"
SERVER = str(Path(__file__).with_name("server.py"))


# A server is given few variables; where packages lie is none of them.
ENV = {name: os.environ[name] for name in ["PYTHONPATH"] if name in os.environ}


def stdio(name: str = "local", **settings: Any) -> ServerConfig:
    settings = {"command": sys.executable, "args": (SERVER,), "env": ENV} | settings
    return ServerConfig(name=name, **settings)


@pytest.fixture(scope="module")
def http() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the HTTP server, on the same port each time."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen([sys.executable, SERVER, str(port)], **quiet))  # type: ignore[call-overload]
        wait_for(lambda: _listens(port))
        return started[-1]

    with nobody() as port:
        start.url = f"http://127.0.0.1:{port}/mcp"  # type: ignore[attr-defined]
        yield start
    for process in started:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def started() -> Iterator[Callable[..., ToolServers]]:
    """Starts servers, and ends them with the test."""
    all_of_them: list[ToolServers] = []

    def start(*configs: ServerConfig) -> ToolServers:
        all_of_them.append(servers := ToolServers(configs))
        servers.start()
        servers.wait(threading.Event())
        return servers

    yield start
    for servers in all_of_them:
        servers.close()


def call(servers: ToolServers, server: str, tool: str, **arguments: Any) -> ToolResult:
    return servers.call(offered(servers, server, tool), arguments, most=200).result(60)


def offered(servers: ToolServers, server: str, tool: str) -> Tool:
    """A tool as its server describes it, or as it could have."""
    known = [each for each in status(servers, server).tools if each.name == tool]
    return known[0] if known else Tool(server, tool, "", {})


def status(servers: ToolServers, name: str) -> ServerStatus:
    return next(status for status in servers.statuses if status.name == name)


def programs(servers: ToolServers) -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [p for p in found if p.status() != "zombie" and p.cmdline()[1:] == [SERVER]]


@pytest.mark.slow
def test_transports(http: Any, started: Callable[..., ToolServers]) -> None:
    process = http()
    far = ServerConfig(name="far", url=http.url, timeout=30)
    servers = started(stdio(env={**ENV, "SECRET": "cheese"}), far)
    for name in ("local", "far"):
        assert status(servers, name).state == "ready"
        tools = {tool.name: tool for tool in status(servers, name).tools}
        assert tools["add"].description == "Add two numbers."
        assert set(tools["add"].schema["properties"]) == {"a", "b"}
        assert call(servers, name, "add", a=1, b=2) == ToolResult("3")
        assert call(servers, name, "fail", why="no").ending == "failed"
        wrong = call(servers, name, "add", a="x", b=2)
        assert (wrong.ending, "valid integer" in wrong.text) == ("failed", True)
        assert call(servers, name, "picture").text == (
            "Look:\n[image: left out, only text can be read]"
        )
        long = call(servers, name, "read.file", path="p")
        assert long.text.endswith("\n[cut: 200 of 1,0" + long.text[-14:])
        assert ("p has cheese" in long.text) == (name == "local")
        stopped = servers.call(offered(servers, name, "sleep"), {"seconds": 60}, most=9)
        time.sleep(0.1)
        assert stopped.cancel()
        assert call(servers, name, "sleep", seconds=0).text == "woke up"
    process.kill()
    process.wait()
    lost = call(servers, "far", "add", a=1, b=2)
    assert lost == ToolResult("The server far ended.", "failed")
    wait_for(lambda: status(servers, "far").state == "failed")
    again = call(servers, "far", "add", a=1, b=2)
    assert again.text.startswith(f"The server far cannot be reached at {http.url}: ")
    http()
    assert call(servers, "far", "add", a=2, b=2) == ToolResult("4")


@pytest.mark.slow
def test_late_answers_and_restarts(started: Callable[..., ToolServers]) -> None:
    servers = started(config := stdio())
    object.__setattr__(config, "timeout", 0.2)  # the start may take longer
    late = call(servers, "local", "sleep", seconds=60)
    assert late == ToolResult("The server local did not answer within 0.2 s.", "failed")
    object.__setattr__(config, "timeout", 60.0)
    assert call(servers, "local", "add", a=1, b=2) == ToolResult("3")
    assert call(servers, "local", "end").text == "The server local ended: out of cheese."
    wait_for(lambda: status(servers, "local").problem == "ended: out of cheese")
    assert status(servers, "local").tools  # they stay known, for the call that starts it again
    assert call(servers, "local", "add", a=1, b=2) == ToolResult("3")
    changed = replace(offered(servers, "local", "add"), description="Add.")
    told = servers.call(changed, {"a": 1, "b": 2}, most=200).result(60)
    assert told.text == "The server local has changed add: see it, and call it again."
    (process,) = programs(servers)
    process.kill()  # nobody calls just then: it is noticed all the same
    wait_for(lambda: status(servers, "local").state == "failed")
    servers.start_again()
    wait_for(lambda: status(servers, "local").state == "ready")
    servers.close()
    assert programs(servers) == []


# -- servers that send too much --------------------------------------------------------------------

TOO_MUCH = "sent more than 1 MB, or too many values, at once"
MANY = b"[],"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MOST_BYTES", MOST)
    monkeypatch.setattr(connection, "MOST_WORDS", MOST // 8)


@pytest.mark.slow
def test_too_large_a_result_ends_its_server_alone(
    http: Any, started: Callable[..., ToolServers], small: None
) -> None:
    http()
    servers = started(stdio(), ServerConfig(name="far", url=http.url, timeout=30))
    for name in ("local", "far"):
        other = "far" if name == "local" else "local"
        assert call(servers, name, "flood", characters=MOST // 8).ending == "done"
        for much in ({"characters": 2 * MOST}, {"characters": 0, "values": MOST // 64}):
            told = call(servers, name, "flood", **much)
            assert told == ToolResult(f"The server {name} {TOO_MUCH}.", "failed")
            wait_for(lambda name=name: status(servers, name).problem == TOO_MUCH)  # type: ignore[misc]
            assert status(servers, other).state == "ready"
            assert call(servers, name, "add", a=1, b=2) == ToolResult("3")


JSON, EVENTS = "application/json", "text/event-stream"
PACKED = gzip.compress(bytes(MOST))
PACKED_LINE = "sends compressed answers, for which nobody asked"
HOSTILE: dict[str, tuple[Callable[[Asked, socket.socket], bytes | None], str]] = {
    "body": (endless(b" " * 9999, answer_head(JSON)), TOO_MUCH),
    "one text": (endless(b"x" * 9999, answer_head(JSON) + b'"'), TOO_MUCH),
    "lines": (endless(b"\n" * 9999, answer_head(JSON)), TOO_MUCH),
    "values": (lambda *_: answer_head(JSON) + b"[" + MANY * (MOST // 64) + b"1]", TOO_MUCH),
    "event": (endless(b"x" * 9999, answer_head(EVENTS) + b"data: "), TOO_MUCH),
    "lines of an event": (endless(b"data: x\n", answer_head(EVENTS)), TOO_MUCH),
    "values of an event": (
        lambda *_: answer_head(EVENTS) + b"data: [" + MANY * (MOST // 64) + b"1]\n\n",
        TOO_MUCH,
    ),
    "redirect": (
        endless(b"x" * 9999, b"HTTP/1.1 307 Go\r\nLocation: /other\r\n\r\n"),
        TOO_MUCH,
    ),
    "refusal": (
        endless(b"x" * 9999, answer_head(JSON, 400)),
        TOO_MUCH,
    ),
    "gzip": (lambda *_: answer_head(JSON, Content_Encoding="gzip") + PACKED, PACKED_LINE),
    "gzip events": (lambda *_: answer_head(EVENTS, Content_Encoding="gzip") + PACKED, PACKED_LINE),
    "head": (endless(b"A: b\r\n", b"HTTP/1.1 200 OK\r\n"), "cannot be reached at URL: "),
}


@pytest.mark.parametrize("way", HOSTILE)
def test_hostile_answers(started: Callable[..., ToolServers], small: None, way: str) -> None:
    answer, told = HOSTILE[way]
    with fake(answer) as server:
        servers = started(ServerConfig(name="far", url=f"{server.url}/mcp", timeout=60))
        assert status(servers, "far").problem.startswith(told.replace("URL", f"{server.url}/mcp"))


def test_drip(started: Callable[..., ToolServers], small: None) -> None:
    """An answer that does not end within the time, though something comes all the time."""

    def answer(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(answer_head(JSON))
        while not server.over.wait(0.01):
            connection.sendall(b" ")

    with fake(answer) as server:
        servers = started(ServerConfig(name="far", url=server.url, timeout=0.5))
        assert status(servers, "far").problem == "did not start within 0.5 s"


@pytest.mark.slow  # the SDK gives a server seconds to end
@pytest.mark.parametrize("line", ["'x' * 9999", "'[],' * 9999"])
def test_endless_line(started: Callable[..., ToolServers], small: None, line: str) -> None:
    code = f"import sys\nwhile True: sys.stdout.write({line})"
    servers = started(ServerConfig(name="local", command=sys.executable, args=("-c", code)))
    assert status(servers, "local").problem == TOO_MUCH


def test_failed_start(started: Callable[..., ToolServers]) -> None:
    python = sys.executable
    wordy = "import sys; print('boo\\n', file=sys.stderr); sys.exit(1)"
    servers = started(
        ServerConfig(name="none", command="not-there"),
        ServerConfig(name="wordy", command=python, args=("-c", wordy)),
        ServerConfig(name="mute", command=python, args=("-c", "input()\ninput()"), timeout=1.0),
        ServerConfig(name="far", url="http://me:secret@127.0.0.1:9/mcp?key=secret"),
    )
    assert {status.name: (status.state, status.problem) for status in servers.statuses} == {
        "none": ("failed", f"cannot be started: not-there: {NO_PROGRAM}"),
        "wordy": ("failed", "ended: boo"),
        "mute": ("failed", "did not start within 1 s"),
        "far": (
            "failed",
            "cannot be reached at http://127.0.0.1:9/mcp: All connection attempts failed",
        ),
    }
    assert call(servers, "none", "add").text == (
        f"The server none cannot be started: not-there: {NO_PROGRAM}."
    )


def test_certificates_that_cannot_be_read(
    started: Callable[..., ToolServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/missing.pem")
    servers = started(ServerConfig(name="far", url="https://127.0.0.1:9/mcp"))
    assert "is no file of certificates" in status(servers, "far").problem
