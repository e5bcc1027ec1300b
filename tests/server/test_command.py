"""``localrt serve`` as a process: what it says, what ends it, and what it refuses to begin."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from localrt.cli import main
from tests.conftest import needs_signals
from tests.server.conftest import command, connected, status_of
from tests.server.dialects import HI
from tests.waits import wait_for

pytestmark = pytest.mark.timeout(600)


@needs_signals
def test_serve_until_signal(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    file.write_text('{"event": "ready", "pid": 1}')  # left by a crash
    few = ("--name", "me", "--max-tokens", "4", "--ready-file", str(file))
    with command(tiny_folder, *few, LOCALRT_API_KEY="k") as (process, port):
        told = json.loads(file.read_text())
        assert (told["event"], told["host"], told["port"]) == ("ready", "127.0.0.1", port)
        assert (told["pid"], told["url"]) == (process.pid, f"http://127.0.0.1:{port}/v1")
        assert (told["model"], told["models"]) == ("me", ["me"])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        body = json.dumps({"model": "me", "messages": HI, "ignore_eos": True})
        key = {"Authorization": "Bearer k"}
        connection.request("POST", "/v1/chat/completions", body, key)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert not file.exists()
    (line,) = map(json.loads, out.splitlines())
    assert (line["event"], line["status"], line["path"]) == ("request", 200, "/v1/chat/completions")


@needs_signals
@pytest.mark.slow
def test_second_signal(tiny_folder: Path) -> None:
    expecting = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    )
    with (
        command(tiny_folder, "--drain", "60") as (process, port),
        connected(port, expecting) as raw,
    ):
        assert b" 100 " in raw.recv(1000)  # it is inside, and waits for what does not come
        process.send_signal(signal.SIGINT)
        wait_for(lambda: status_of(port, "/health") == 503)
        assert status_of(port, "/v1/models") == 503
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        with suppress(ConnectionError):
            assert b" 408 " not in raw.recv(1000)  # nor had the request's own time run out
        said = "".join(process.communicate())
        assert "answers are finishing: Ctrl+C again ends them" in said


@pytest.mark.slow
def test_it_ends_with_its_parent(tiny_folder: Path) -> None:
    """And warns, meanwhile, of an address that is open to all."""
    open_to_all = () if sys.platform == "win32" else ("--host", "0.0.0.0")
    waits = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as parent:
        own = ("--parent", str(parent.pid), "--quiet", *open_to_all)
        with command(tiny_folder, *own, log=()) as (process, port):
            assert status_of(port, "/health") == 200
            assert process.poll() is None
            parent.kill()
            parent.wait()
            out, error = process.communicate(timeout=120)
            assert (process.returncode, out) == (0, "")
            assert "Ctrl+C" not in error
            assert error.count("\n") == len(open_to_all) // 2
            assert not open_to_all or "LOCALRT_API_KEY" in error


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (("--port", "{port}"), 1, "in use"),
        (("--max-body", "lots"), 2, "max-body"),
        (("--parent", "999999999"), 2, "--parent must be a process's id: none has 999999999"),
        (("--ready-file", "{notes}"), 2, "is another file: give another name"),
    ],
)
def test_refused_on_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        given = [each.format(port=port, notes=notes) for each in args]
        assert main(["serve", "not-there", "--port", "0", *given]) == status
    out, error = capsys.readouterr()
    assert (out, error.count("\n"), notes.read_text()) == ("", 1, "mine")
    assert said in error
    if status == 1 and sys.platform == "linux":
        assert f"(process {os.getpid()})" in error
