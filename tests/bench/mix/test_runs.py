"""Whole mixes against a server in this process, and the servers that a benchmark starts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrt.bench.mix import runner
from localrt.bench.mix.mix import App, AppRequest, Goals, Mix, Neighbour
from localrt.bench.mix.report import to_json, to_table
from localrt.bench.mix.runner import MixOutcome, Outcome, run_mix
from localrt.bench.mix.servers import (
    Client,
    LlamaServer,
    Localrt,
    RunningServer,
    Target,
    TimedReply,
    make_servers,
)
from localrt.client.servers import read_address
from localrt.common.errors import LocalrtError, OptionError
from localrt.offload import hardware
from tests.bench.mix.test_neighbours import ended
from tests.conftest import needs_scripts
from tests.fake_endpoint import DONE, HEAD, Asked, Fake, delta, event, fake, listed, whole
from tests.waits import wait_for

ROOT = Path(__file__).parents[3]
USAGE = {"prompt_tokens": 11, "completion_tokens": 4}
CHAT = App(
    name="chat",
    class_="interactive",
    kind="chat",
    model="m",
    every_s=60,
    prompt_words=5,
    answer_tokens=4,
    turns=2,
    goals=Goals(ttft_s=60),
)
APPS = (
    CHAT,
    App(name="type", class_="completion", kind="completion", model="m", every_s=60,
        prompt_words=5, answer_tokens=4, goals=Goals(deadline_s=1e-9)),
    App(name="index", class_="background", kind="embeddings", model="m", every_s=0.5,
        prompt_words=5, texts=2),
    App(name="batch", class_="background", kind="batch", model="broken", closed=1,
        prompt_words=5, answer_tokens=4),
)  # fmt: skip
MIX = Mix(name="day", seconds=3, seed=1, models={"m": "m", "broken": "broken"}, apps=APPS)


def answer(asked: Asked, connection: socket.socket) -> bytes | None:
    """One fake server: it answers in three pieces, each a space, which take no time to read."""
    if asked.path == "/v1/models":
        return listed("m", "broken")
    if not asked.body:  # the client went away while it was sending
        return None
    if asked.path == "/v1/embeddings":
        return whole(200, {"data": [], "usage": {"prompt_tokens": 7}})
    if asked.body["model"] == "broken" and asked.body["max_tokens"] > 2:
        return whole(500, {"error": {"message": "out of order"}})
    if asked.path == "/v1/completions":
        pieces = [event(choices=[{"text": "x"}]) for _ in range(3)]
    else:
        pieces = [delta(content="", role="assistant"), *(delta(content=" ") for _ in range(3))]
    return HEAD + b"".join(pieces) + event(choices=[], usage=USAGE) + DONE


def _report(outcome: MixOutcome, mix: Mix = MIX) -> dict[str, Any]:
    found = to_json(outcome, mix, hardware.probe())
    return dict(json.loads(json.dumps(found)))


@pytest.fixture(scope="module")
def played() -> tuple[Fake, dict[str, Any]]:
    neighbour = Neighbour(name="film", kind="video", work={"frame_ms": 5.0, "work_mb": 0.01})
    with fake(answer) as server:
        endpoint = RunningServer(server.url, None)
        endpoint.check(MIX)
        mix = replace(MIX, neighbours=(neighbour,))
        outcome = run_mix(mix, [endpoint], 1, lambda line: None)
        return server, _report(outcome, mix)


def test_a_whole_mix(played: tuple[Fake, dict[str, Any]]) -> None:
    server, report = played
    assert report["kind"] == "mix"
    assert not report["interrupted"]
    assert report["mix"]["apps"][0]["class"] == "interactive"
    assert report["mix"]["apps"][0]["prompts"] == 0
    (found,) = report["servers"]
    chat, typing, index, batch = found["apps"]
    assert (chat["requests"], chat["failed"], chat["goals_met"]) == (2, 0, 1)
    assert (chat["tokens"], chat["goals"]["ttft_s"]) == (8, 60)
    assert chat["events"][0]["prompt_tokens"] == 11
    assert chat["ttft_s"]["p50"] > 0
    assert chat["tpot_s"]["p50"] >= 0
    # Completions were answered before they were given up.
    assert 1 <= typing["requests"] <= 3
    assert (typing["cancelled"], typing["failed"], typing["goals_met"]) == (0, 0, 0)
    assert (index["requests"], index["goals_met"], index["tokens"]) == (6, None, 0)
    assert index["ttft_s"] == {"p50": None, "p95": None, "p99": None}
    assert batch["failed"] == batch["requests"] >= 1
    assert "out of order" in batch["events"][0]["error"]
    assert 0 < found["goals_met"] < 1
    classes = {(one.path, one.headers["x-localrt-class"]) for one in server.asked if one.body}
    assert ("/v1/chat/completions", "interactive") in classes
    assert ("/v1/completions", "completion") in classes
    assert ("/v1/embeddings", "background") in classes


def test_what_the_machine_did(played: tuple[Fake, dict[str, Any]]) -> None:
    (found,) = played[1]["servers"]
    assert found["samples"]
    assert set(found["samples"][0]["owners"]) == {"film"}  # a running server's is not known
    (film,) = found["neighbours"]
    assert film["frames"] > 0
    assert film["frame_ms"]["p50"] > 0
    assert 0 < found["sampler_cpu_s"] <= found["client_cpu_s"]
    assert found["measuring_cpu_share"] > 0


def test_table(played: tuple[Fake, dict[str, Any]]) -> None:
    lines = to_table(played[1])
    assert "day: 3.0 s, 4 applications, 1 neighbours" in lines
    assert "of the requests met their goals" in lines
    assert "interactive" in lines
    assert "frames of film" in lines
    assert "not measured" in lines


def test_medians_over_runs() -> None:
    with fake(answer) as server:
        endpoint = RunningServer(server.url, None)
        mix = replace(MIX, seconds=0.3, apps=(APPS[2],))
        endpoint.check(mix)
        report = _report(run_mix(mix, [endpoint], 2, lambda line: None), mix)
    (found,) = report["servers"]
    (app,) = found["apps"]
    assert (found["runs"], app["requests"]) == (2, 1)
    assert [each["run"] for each in app["events"]] == [1, 2]
    first, second = [one.body["input"] for one in server.asked if one.body][1::2]
    for one, other in zip(first, second, strict=True):  # the same, but nothing to find in a cache
        assert one[:8] != other[:8]
        assert one[8:] == other[8:]


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()

    def hang(asked: Asked, connection: socket.socket) -> bytes | None:
        if asked.body and "messages" in asked.body and asked.body["max_tokens"] > 2:
            hanging.set()
            connection.recv(1)  # until the client goes away
            return None
        return answer(asked, connection)

    def interrupt(seconds: float) -> None:
        if hanging.is_set():
            raise KeyboardInterrupt

    with fake(hang) as server:
        endpoint = RunningServer(server.url, None)
        endpoint.check(MIX)
        monkeypatch.setattr(runner.time, "sleep", interrupt)
        outcome = run_mix(replace(MIX, seconds=600), [endpoint], 2, lambda line: None)
    report = _report(outcome)
    assert report["interrupted"]
    assert "interrupted" in to_table(report)
    assert report["servers"][0]["apps"][0]["requests"] == 0  # it was under way
    assert report["servers"][0]["runs"] == 1


def test_not_finished_after_the_end() -> None:
    def hang(asked: Asked, connection: socket.socket) -> bytes | None:
        if asked.body and "messages" in asked.body and asked.body["max_tokens"] > 2:
            connection.recv(1)
            return None
        return answer(asked, connection)

    mix = replace(MIX, seconds=1, apps=(CHAT,))
    with fake(hang) as server:
        endpoint = RunningServer(server.url, None)
        endpoint.check(mix)
        run = runner.MixRun([])
        with endpoint.serve(mix) as running:
            runner.play(mix, running, run, "", drain_s=0.1)
    (one,) = run.events
    assert one.reply.error == "not finished 0.1 s after the end"
    assert one.met is False


# -- one request -----------------------------------------------------------------------------------


def _send(reply: Any, request: AppRequest) -> TimedReply:
    with fake(lambda asked, connection: reply(asked, connection)) as server:
        return Client().send(Target(read_address(server.url), "m"), request, "interactive")


BODY = {"messages": [], "stream": True}


def test_given_up() -> None:
    def hang(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(HEAD + delta(content="a"))
        connection.recv(1)

    reply = _send(hang, AppRequest("/chat/completions", BODY, give_up_s=0.5))
    assert reply.cancelled
    assert reply.error is None
    event = Outcome.of(CHAT, 0.0, reply)
    assert event.met is None
    late = replace(CHAT, goals=Goals(deadline_s=0.1))
    assert Outcome.of(late, 0.0, reply).met is False


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (whole(429, {"error": {"message": "later"}}), "busy (429: later)"),
        (whole(200, b"<html>"), "broke off in the middle"),
        (HEAD + delta(content="a"), "broke off in the middle"),
        (HEAD + event(error={"message": "no memory"}), "no memory"),
        (HEAD + event(choices="x"), "does not speak OpenAI's protocol"),
        (b"nonsense\r\n\r\n", "does not speak HTTP"),
    ],
)
def test_failures(raw: bytes, line: str) -> None:
    reply = _send(lambda asked, connection: raw, AppRequest("/chat/completions", BODY))
    assert line in (reply.error or "")
    assert Outcome.of(CHAT, 0.0, reply).met is False


def test_counts() -> None:
    pieces = b"".join(delta(content=each) for each in "abc")
    reply = _send(lambda *_: HEAD + pieces + DONE, AppRequest("/chat/completions", BODY))
    assert (reply.text, reply.tokens, len(reply.at)) == ("abc", 3, 3)
    reply.at = [0.1, 0.2, 2.0]
    assert reply.stalls(1.0) == 1
    assert reply.ttft_s == 0.1
    assert reply.tpot_s == pytest.approx(0.95)


# -- servers ---------------------------------------------------------------------------------------


def test_names_of_models_at_a_url() -> None:
    with fake(lambda *_: listed("one")) as server:
        endpoint = RunningServer(server.url, None)
        endpoint.check(MIX)  # the only model is meant
        with endpoint.serve(MIX) as running:
            assert {place.model for place in running.places.values()} == {"one"}
    with fake(lambda *_: listed("one", "two")) as server:
        with pytest.raises(LocalrtError, match="lists one, two, and not 'm': give --model m=NAME"):
            RunningServer(server.url, None).check(MIX)
        RunningServer(server.url, None).check(replace(MIX, models={"m": "x/two.gguf"}))
    with pytest.raises(LocalrtError, match="cannot be read"):
        RunningServer(server.url, None).check(MIX)


@needs_scripts
def test_bad_peers(tmp_path: Path) -> None:
    file = tmp_path / "no-program"
    file.touch()
    for peer, line in (
        ("llama-server", "give a URL, or llama-server=PROGRAM"),
        (f"x={file}", "is no program"),
        (f"localrt={sys.executable}", "two servers are called localrt"),
    ):
        with pytest.raises(OptionError, match=line):
            make_servers(MIX, {"m": Path("m.gguf")}, [peer], options={}, arguments=[], key=None)
    adapted = replace(MIX, apps=(replace(CHAT, adapter="a"),))
    with pytest.raises(LocalrtError, match=r"\[\[app\]\] chat: adapter needs a mix of one model"):
        Localrt({"m": Path("a"), "n": Path("b")}, {}).check(adapted)
    with pytest.raises(LocalrtError, match="reads GGUF files only: m is folder"):
        LlamaServer("x", Path(sys.executable), {"m": Path("folder")}, []).check(MIX)


SERVER = """#!{python}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--fail" in sys.argv:
    sys.exit("no such model")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
print("x" * 200_000)  # more than a pipe holds
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def _program(folder: Path) -> Path:
    file = folder / "server"
    file.write_text(SERVER.format(python=sys.executable))
    file.chmod(0o755)
    return file


@needs_scripts
def test_a_process_for_each_model_and_use(tmp_path: Path) -> None:
    paths = {"m": tmp_path / "m.gguf", "broken": tmp_path / "b.gguf"}
    server = LlamaServer("peer", _program(tmp_path), paths, ["--flag"])
    server.check(MIX)
    with server.serve(MIX) as running:
        pids = list(running.owners.values())
        assert list(running.owners) == ["peer (chat)", "peer (index)", "peer (batch)"]
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert len({place.address for place in running.places.values()}) == 3
        assert running.places["chat"].address == running.places["type"].address
        assert "server -m m.gguf -np 4 -c 32768 --cont-batching --flag" in running.commands
        assert "--embeddings" in running.commands[1]
        assert str(tmp_path) not in str(running.commands)
    assert all(ended(pid) for pid in pids)


@needs_scripts
def test_a_server_that_does_not_start_is_skipped(tmp_path: Path) -> None:
    server = LlamaServer("peer", _program(tmp_path), {"m": tmp_path / "m.gguf"}, ["--fail"])
    mix = replace(MIX, apps=(CHAT,))
    outcome = run_mix(mix, [server], 2, lambda line: None)
    assert outcome.skipped == {"peer": "the server did not start: no such model"}
    assert "peer did not run: the server did not start" in to_table(_report(outcome, mix))


PARENT = """
import sys
from contextlib import ExitStack
from localrt.bench.mix.servers import Running, start
from tests.conftest import needs_scripts
running = Running()
with ExitStack() as stack:
    start(stack, running, "x", [sys.argv[1]])
    print(*running.owners.values(), flush=True)
    sys.stdin.read()
"""


@needs_scripts
def test_servers_end_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(_program(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not ended(pid)
        parent.kill()
    wait_for(lambda: ended(pid))
