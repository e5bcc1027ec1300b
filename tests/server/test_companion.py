"""``localrt serve`` as a part of another program: where it is, and that it ends with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import needs_signals
from tests.server.conftest import status_of
from tests.server.test_life import failed

pytestmark = pytest.mark.timeout(600)


@contextmanager
def companion(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``localrt serve`` in a process, and its first line on stdout."""
    process = subprocess.Popen(
        [sys.executable, "-m", "localrt", "serve", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOCALRT_OFFLINE": "1"},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


@needs_signals
def test_it_says_where_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    file.write_text('{"event": "ready", "pid": 1}')  # left by a crash
    args = (str(tiny_folder), "--name", "me", "--port", "0", "--ready-file", str(file), "--quiet")
    with companion(*args) as (process, line):
        told = json.loads(line)
        assert json.loads(file.read_text()) == told
        assert (told["event"], told["host"], told["pid"]) == ("ready", "127.0.0.1", process.pid)
        assert told["url"] == f"http://127.0.0.1:{told['port']}/v1"
        assert (told["model"], told["models"]) == ("me", ["me"])
        assert status_of(told["port"], "/v1/models") == 200
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "")
    assert not file.exists()


def test_it_ends_with_its_parent(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        own = ("--parent", str(parent.pid), "--port", "0", "--ready-file", str(file))
        with companion(str(tiny_folder), *own) as (process, line):
            port = json.loads(line)["port"]
            assert status_of(port, "/health") == 200
            assert process.poll() is None
            parent.kill()
            parent.wait()
            out, error = process.communicate(timeout=120)
            assert (process.returncode, out) == (0, "")
            assert "Ctrl+C" not in error
    assert not file.exists()


def test_a_parent_that_ends_while_it_loads() -> None:
    code = (
        "import time, localrt.cli.serve as serve\n"
        "def load(*_, **__): print('loading', flush=True); time.sleep(600)\n"
        "serve.load_model = load"
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        start = f"{code}\nfrom localrt.cli import main\nraise SystemExit(main())"
        command = [sys.executable, "-c", start, "serve", "x", "--port", "0", "--parent"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([*command, str(parent.pid)], **pipes) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"loading\n"
            parent.kill()
            parent.wait()
            _, error = process.communicate(timeout=120)
        assert process.returncode != 0
        assert error == b""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--parent", "999999999"), "--parent must be a process's id: none has 999999999"),
        (("--ready-file", "/no/such/folder/file"), "--ready-file must be in a folder"),
    ],
)
def test_what_cannot_be(tiny_folder: Path, args: tuple[str, ...], words: str) -> None:
    result = failed(str(tiny_folder), "--port", "0", *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_another_file_is_kept(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    result = failed(str(tiny_folder), "--port", "0", "--ready-file", str(file))
    assert (result.returncode, file.read_text()) == (2, "mine")
    assert "is another file: give another name" in result.stderr


def test_the_holder_of_a_port_is_named(tiny_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        result = failed(str(tiny_folder), "--port", str(holder.getsockname()[1]))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "the port is in use" in result.stderr
    if sys.platform == "linux":
        assert f"(process {os.getpid()})" in result.stderr
