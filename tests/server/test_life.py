"""Clients that go away or do not read, too many of them, and a server that stops; its process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrt.cli import main, serve
from localrt.common.processes import process_name
from localrt.server import generating
from localrt.service.live import LiveModel
from tests.conftest import needs_signals
from tests.inside import engine_of
from tests.server.conftest import Running, command, connected, serving, status_of
from tests.server.dialects import BODIES, HI, SIGNS
from tests.waits import wait_for

pytestmark = pytest.mark.timeout(600)

LONG: dict[str, Any] = {"messages": HI, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def send(
    running: Running,
    fields: dict[str, Any],
    *,
    path: str = "/v1/chat/completions",
    small: bool = False,
) -> socket.socket:
    """A request on a socket of its own; ``small``: one whose buffer takes little."""
    raw = socket.socket()
    if small:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(120)
    raw.connect(("127.0.0.1", running.port))
    body = json.dumps(fields).encode()
    raw.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return raw


def test_long_prompts_delay_no_short_ones(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, go_on = LiveModel.submit, threading.Event()

    def slowly(self: LiveModel, prompt: Any = None, **options: Any) -> Any:
        if len(str(prompt)) > 30_000:
            assert go_on.wait(60)
        return submit(self, prompt, **options)

    monkeypatch.setattr(LiveModel, "submit", slowly)
    with ThreadPoolExecutor(6) as threads:
        long = [threads.submit(server.chat, "a" * 40_000, max_tokens=2) for _ in range(5)]
        try:
            assert server.chat(max_tokens=2)[0] == 200
            assert [one.result() for one in long if one.done()] == []
        finally:
            go_on.set()
        assert {one.result()[0] for one in long} == {400}


@pytest.mark.parametrize(
    ("path", "stream"), [("/v1/chat/completions", False), ("/v1/responses", True)]
)
def test_client_disconnects(slow: None, server: Running, path: str, stream: bool) -> None:
    lines = len(server.log)
    most = {"max_tokens": 400, "max_output_tokens": 400, "options": {"num_predict": 400}}
    fields = {**BODIES[path], **most, "ignore_eos": True, "temperature": 0, "stream": stream}
    raw = send(server, fields, path=path)
    wait_for(lambda: server.live.stats().running == 1)
    before = server.live.stats().completion_tokens
    if stream:
        assert raw.recv(100)
    raw.close()
    wait_for(server.idle)
    assert server.live.stats().completion_tokens - before < 300
    wait_for(lambda: len(server.log) > lines)
    assert server.log[-1].status == 499


def test_disconnect_in_queue(slow: None, model: Any) -> None:
    with serving(model, max_running=1) as running:
        first = send(running, LONG)
        wait_for(lambda: running.live.stats().running == 1)
        second = send(running, LONG)
        wait_for(lambda: running.live.stats().waiting == 1)
        second.close()
        wait_for(lambda: running.live.stats().waiting == 0)
        assert running.live.stats().running == 1
        first.close()
        wait_for(running.idle)


def test_client_that_never_reads(model: Any) -> None:
    fat = {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 8}
    with serving(model, write_timeout_s=1.0, max_running=9) as running:
        # The listening socket's buffer is what accepted ones begin with.
        raw = send(running, fat, small=True)
        status, got, _ = running.chat(max_tokens=8, ignore_eos=True)
        assert status == 200
        assert got["usage"]["completion_tokens"] == 8
        wait_for(running.idle)
        wait_for(lambda: running.log[-1].status == 499)
        assert running.live.stats().completion_tokens < 8 * 400
        assert running.chat(max_tokens=2)[0] == 200
        raw.close()


@pytest.mark.parametrize("path", SIGNS)
def test_signs_of_life(
    slow: None, server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    for seconds in (1000.0, 0.001):
        monkeypatch.setattr(generating, "_SILENT_S", seconds)
        status, text, _ = server.request("POST", path, {**BODIES[path], "stream": True})
        assert status == 200
        assert (text.count(SIGNS[path]) > 1) is (seconds < 1)


def test_signs_of_life_within_call(
    slow: None, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens come all the time, but there is nothing to show of them before the call's end."""
    monkeypatch.setattr(generating, "_SILENT_S", 0.1)
    word = {"type": "string", "minLength": 40, "maxLength": 60}
    tool = {"name": "say", "parameters": {"type": "object", "properties": {"word": word}}}
    fields = {
        "messages": HI,
        "tools": [{"type": "function", "function": {**tool, "required": ["word"]}}],
        "tool_choice": "required",
        "max_tokens": 80,
        "stream": True,
    }
    status, text, _ = server.request("POST", "/v1/chat/completions", fields)
    assert status == 200
    assert text.count('"delta":{}') > 3


def test_queue_is_full(slow: None, model: Any) -> None:
    with serving(model, max_running=1, max_queued=1) as running:
        inside = [send(running, LONG), send(running, LONG)]
        wait_for(lambda: running.service.open_answers == 2)
        status, body, headers = running.chat()
        assert status == 429
        assert body["error"]["type"] == "rate_limit_error"
        assert int(headers["retry-after"]) >= 1
        for raw in inside:
            raw.close()
        wait_for(running.idle)
        assert running.chat(max_tokens=2)[0] == 200


def test_prometheus_metrics(model: Any) -> None:
    with serving(model, name="tiny") as running:
        assert running.chat(max_tokens=5, ignore_eos=True)[0] == 200
        assert running.request("GET", "/v1/secret-path")[0] == 404
        status, text, headers = running.request("GET", "/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        values = dict(
            line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
        )
        named = '{model="tiny"}'
        path = 'path="/v1/chat/completions"'
        assert values[f'localrt_http_requests_total{{{path},status="200"}}'] == "1"
        assert values['localrt_http_requests_total{path="other",status="404"}'] == "1"
        assert values[f"localrt_generated_tokens_total{named}"] == "5"
        assert int(values[f"localrt_prompt_tokens_total{named}"]) > 5
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        assert len(names) == text.count("# TYPE") == 3


def test_graceful_stop(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = []
    engine: Any = engine_of(model)
    extend = engine.extend_batch
    with serving(model, drain_s=100.0) as running:

        def held(*parts: Any, **options: Any) -> Any:
            wait_for(lambda: running.server.should_exit)  # else the answer may be over before
            return extend(*parts, **options)

        monkeypatch.setattr(engine, "extend_batch", held, raising=False)
        asked = threading.Thread(
            target=lambda: results.append(running.chat(max_tokens=25, ignore_eos=True))
        )
        asked.start()
        wait_for(lambda: running.live.stats().running == 1)
    asked.join(120)
    assert results[0][0] == 200
    assert results[0][1]["usage"]["completion_tokens"] == 25


def test_stop_after_drain(slow: None, model: Any) -> None:
    with serving(model, drain_s=0.3) as running:
        raw = send(running, {**LONG, "stream": True})
        wait_for(lambda: running.live.stats().running == 1)
        received = raw.recv(100)
    with raw:
        while piece := raw.recv(65536):
            received += piece
    assert b" 200 " in received
    assert b"the server is stopping" in received


# -- ``localrt serve`` as a process ----------------------------------------------------------------


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


@pytest.mark.parametrize("step", [-1e6, -2.0, 2.0, 1e6])
def test_a_clock_that_is_set_ends_no_server(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks as long as its parent is there."""
    ended: list[int] = []
    looks = 0

    def pause(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            parent.kill()
            parent.wait()

    waits = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as parent:
        name = process_name(parent.pid)
        assert name is not None
        now, booted = time.time, psutil.boot_time()
        monkeypatch.setattr(time, "time", lambda: now() + step)
        monkeypatch.setattr("psutil._psplatform.boot_time", lambda: booted + step)
        monkeypatch.setattr(time, "sleep", pause)
        monkeypatch.setattr(signal, "raise_signal", ended.append)
        serve._end_with(name)
    assert (looks, ended) == (3, [signal.SIGTERM])


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
