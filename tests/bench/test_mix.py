"""Mixes: what a file may say, one whole mix against a server here, and what can go wrong."""

from __future__ import annotations

import json
import socket
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrt.bench.mix.mix import (
    SHIPPED,
    App,
    AppRequest,
    Goals,
    Mix,
    Neighbour,
    arrivals,
    marked,
    read_mix,
    session,
)
from localrt.bench.mix.neighbours import NeighbourHandlers, RunningNeighbour
from localrt.bench.mix.report import to_json, to_table
from localrt.bench.mix.runner import Outcome, run_mix
from localrt.bench.mix.servers import Client, LlamaServer, RunningServer, Target, TimedReply
from localrt.client.servers import read_address
from localrt.common.errors import LocalrtError, OptionError
from localrt.offload import hardware
from tests.conftest import needs_scripts
from tests.fake_endpoint import DONE, HEAD, Asked, delta, event, fake, listed, whole
from tests.waits import wait_for

# -- the file --------------------------------------------------------------------------------------

GOOD = """
seconds = 60
seed = 7
[models]
small = "a.gguf"
[server]
ram = "2GB"
[[app]]
name = "chat"
class = "interactive"
kind = "chat"
model = "small"
every_s = 5
goals = { ttft_s = 1, tpot_s = 0.2 }
[[neighbour]]
name = "film"
kind = "video"
[[neighbour]]
name = "other"
kind = "memory"
bytes = "2GB"
for_s = 10
"""


def _read(folder: Path, text: str, **options: Any) -> Any:
    file = folder / "day.toml"
    file.write_text(text)
    return read_mix(str(file), **options)


def test_values(tmp_path: Path) -> None:
    mix = _read(tmp_path, GOOD)
    assert (mix.name, mix.seconds, mix.seed, mix.server) == ("day", 60, 7, {"ram": "2GB"})
    (app,) = mix.apps
    assert (app.name, app.class_, app.every_s, app.turns) == ("chat", "interactive", 5, 3)
    assert app.goals == Goals(ttft_s=1, tpot_s=0.2)
    film, other = mix.neighbours
    assert film.work == {"frame_ms": 33.3, "work_mb": 4.0}
    assert (other.for_s, other.work) == (10, {"bytes": 2_000_000_000})
    # Models and seconds of the command line.
    assert _read(tmp_path, GOOD, models={"small": "b"}).models == {"small": "b"}
    assert _read(tmp_path, GOOD, every="c", seconds=3).models == {"small": "c"}
    short = _read(tmp_path, GOOD.replace("for_s", "start_s = 30\nfor_s"), seconds=6)
    assert (short.seconds, short.apps[0].every_s) == (6, 5)
    assert [(each.start_s, each.for_s) for each in short.neighbours] == [(0, None), (3, 1)]
    with pytest.raises(OptionError, match=r"--model large=\.\.\.: .*day.toml has no such model"):
        _read(tmp_path, GOOD, models={"large": "b"})
    for name in SHIPPED:
        assert set(read_mix(name, every="m").models.values()) == {"m"}
        with pytest.raises(LocalrtError, match=f"{name}: \\[\\[app\\]\\] 1: model .*--model"):
            read_mix(name)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("seconds = 60", "", "the file: seconds is missing"),
        ("seed = 7", "seeds = 7", "the file: seeds is unknown: did you mean seed?"),
        ('model = "small"', 'model = "big"', "[[app]] 1: model 'big' is not in [models]"),
        ("every_s = 5", "every_s = true", "[[app]] 1: every_s must be a number above 0, is True"),
        ('name = "other"', 'name = "film"', "[[neighbour]] 2: name 'film' is used twice"),
        ("seed = 7", "seed =", "is not TOML"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert old in GOOD
    with pytest.raises(LocalrtError) as caught:
        _read(tmp_path, GOOD.replace(old, new))
    message = str(caught.value)
    assert line in message
    assert "day.toml" in message
    assert "\n" not in message
    assert not isinstance(caught.value, OptionError)  # exit status 1


# -- goals -----------------------------------------------------------------------------------------


TIMES = {"ttft_s": 1.0, "tpot_s": 0.1, "deadline_s": 5.0, "tokens_s": 10.0}


def test_goals() -> None:
    """An answer of 50 tokens with exactly these times, and with one goal a little tighter."""
    took: dict[str, Any] = {"ttft_s": 1.0, "tpot_s": 0.1, "total_s": 5.0, "tokens": 50}
    assert Goals().met(**took)
    assert Goals(**TIMES).met(**took)
    for name, time in TIMES.items():
        tighter = time * (1.01 if name == "tokens_s" else 0.99)
        assert not Goals(**{**TIMES, name: tighter}).met(**took)
    # An answer that is given up has missed what it had no time left for.
    for after, first, missed in (
        *((0.4, None, False), (0.6, None, True), (1.9, 0.4, False)),
        *((1.9, 0.6, True), (2.1, 0.4, True)),
    ):
        assert Goals(ttft_s=0.5, deadline_s=2).missed_by(after, ttft_s=first) is missed
        assert not Goals().missed_by(after, ttft_s=first)


# -- what applications send ------------------------------------------------------------------------

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


def test_arrivals() -> None:
    app = replace(CHAT, every_s=None, start_s=3)
    assert arrivals(replace(app, every_s=4), 20, 1) == [3, 7, 11, 15, 19]
    random = arrivals(replace(app, poisson_s=1.0), 1000, 1)
    assert random == sorted(random) == arrivals(replace(app, poisson_s=1.0), 1000, 1)
    assert 800 < len(random) < 1200
    assert all(3 <= at < 1000 for at in random)
    assert arrivals(replace(app, closed=2), 20, 1) == []


def _play(app: App, index: int = 0, seed: int = 1) -> list[AppRequest]:
    steps, found = session(app, index, seed), []
    try:
        request = next(steps)
        while True:
            found.append(request)
            request = steps.send("four words of answer")
    except StopIteration:
        return found


def test_sessions() -> None:
    """They depend on the seed and their number alone."""
    for kind in ("chat", "completion", "agent", "summary", "embeddings", "batch"):
        app = replace(CHAT, kind=kind, prompt_words=20, turns=3, texts=2)
        requests = _play(app)
        assert requests == _play(app)
        assert requests != _play(app, index=1)
        assert requests != _play(app, seed=2)
        for request in requests:
            body = marked(request, "x: ").body
            texts = body.get("input") or [body.get("prompt") or body["messages"][0]["content"]]
            assert all(text.startswith("x: ") for text in texts)
            assert marked(request, "") == request
    first, second, third = _play(replace(CHAT, turns=3))
    assert (first.pause_s, second.pause_s) == (0, 1)  # four words are read
    assert third.body["messages"][:3] == second.body["messages"]
    assert second.body["messages"][1]["content"] == "four words of answer"
    seen = set()
    for index in range(20):
        *given_up, last = _play(replace(CHAT, kind="completion"), index)
        seen.add(len(given_up))
        prompts = [step.body["prompt"] for step in (*given_up, last)]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(prompts))
    assert seen == {0, 1, 2}


# -- a whole mix -----------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 11, "completion_tokens": 4}
APPS = (
    CHAT,
    App(name="type", class_="completion", kind="completion", model="m", every_s=60,
        prompt_words=5, answer_tokens=4, goals=Goals(deadline_s=1e-9)),
    App(name="index", class_="background", kind="embeddings", model="m", every_s=0.5,
        prompt_words=5, texts=2),
    App(name="batch", class_="background", kind="batch", model="broken", closed=1,
        prompt_words=5, answer_tokens=4),
)  # fmt: skip
MIX = Mix(name="day", seconds=2, seed=1, models={"m": "m", "broken": "broken"}, apps=APPS)


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


def test_a_whole_mix() -> None:
    neighbour = Neighbour(name="film", kind="video", work={"frame_ms": 5.0, "work_mb": 0.01})
    with fake(answer) as server:
        endpoint = RunningServer(server.url, None)
        endpoint.check(MIX)
        mix = replace(MIX, neighbours=(neighbour,))
        outcome = run_mix(mix, [endpoint], 1, lambda line: None)
    report = json.loads(json.dumps(to_json(outcome, mix, hardware.probe())))
    (found,) = report["servers"]
    chat, typing, index, batch = found["apps"]
    assert (chat["requests"], chat["failed"], chat["goals_met"]) == (2, 0, 1)
    assert (chat["tokens"], chat["goals"]["ttft_s"]) == (8, 60)
    assert chat["events"][0]["prompt_tokens"] == 11
    assert chat["ttft_s"]["p50"] > 0
    # Completions were answered before they were given up.
    assert 1 <= typing["requests"] <= 3
    assert (typing["cancelled"], typing["failed"], typing["goals_met"]) == (0, 0, 0)
    assert (index["requests"], index["goals_met"], index["tokens"]) == (4, None, 0)
    assert batch["failed"] == batch["requests"] >= 1
    assert "out of order" in batch["events"][0]["error"]
    assert 0 < found["goals_met"] < 1
    classes = {(one.path, one.headers["x-localrt-class"]) for one in server.asked if one.body}
    assert ("/v1/chat/completions", "interactive") in classes
    assert ("/v1/embeddings", "background") in classes
    # What the machine did.
    assert set(found["samples"][0]["owners"]) == {"film"}  # a running server's is not known
    (film,) = found["neighbours"]
    assert film["frames"] > 0
    assert 0 < found["sampler_cpu_s"] <= found["client_cpu_s"]
    lines = to_table(report)
    for words in ("of the requests met their goals", "frames of film", "not measured"):
        assert words in lines


def _send(reply: Any, **more: Any) -> TimedReply:
    request = AppRequest("/chat/completions", {"messages": [], "stream": True}, **more)
    with fake(lambda asked, connection: reply(asked, connection)) as server:
        return Client().send(Target(read_address(server.url), "m"), request, "interactive")


def test_one_request() -> None:
    pieces = b"".join(delta(content=each) for each in "abc")
    reply = _send(lambda *_: HEAD + pieces + DONE)
    assert (reply.text, reply.tokens, len(reply.at)) == ("abc", 3, 3)
    reply.at = [0.1, 0.2, 2.0]
    assert reply.stalls(1.0) == 1
    assert reply.ttft_s == 0.1
    assert reply.tpot_s == pytest.approx(0.95)

    def hang(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(HEAD + delta(content="a"))
        connection.recv(1)

    reply = _send(hang, give_up_s=0.5)
    assert reply.cancelled
    assert reply.error is None
    assert Outcome.of(CHAT, 0.0, reply).met is None
    late = replace(CHAT, goals=Goals(deadline_s=0.1))
    assert Outcome.of(late, 0.0, reply).met is False


# -- servers and neighbours ------------------------------------------------------------------------


SERVER = """#!{python} -S
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
        assert len({place.address for place in running.places.values()}) == 3
        assert running.places["chat"].address == running.places["type"].address
        assert "server -m m.gguf -np 4 -c 32768 --cont-batching --flag" in running.commands
        assert "--embeddings" in running.commands[1]
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    # One that does not start is skipped.
    server = LlamaServer("peer", _program(tmp_path), {"m": tmp_path / "m.gguf"}, ["--fail"])
    outcome = run_mix(replace(MIX, apps=(CHAT,)), [server], 2, lambda line: None)
    assert outcome.skipped == {"peer": "the server did not start: no such model"}


WORK: dict[str, dict[str, Any]] = {
    "compiler": {"cores": 2, "busy_s": 0.01, "idle_s": 0.01},
    "video": {"frame_ms": 1.0, "work_mb": 0.01},
    "memory": {"bytes": 1 << 20},
    "disk": {"bytes": 1 << 20},
}


def test_neighbours() -> None:
    """They work until they are stopped, and what went wrong is reported."""
    before = threading.active_count()
    figures = {"video": {"frames", "dropped", "frame_ms"}, "disk": {"copies"}}
    for kind, work in WORK.items():
        handlers = NeighbourHandlers()
        handlers.start(kind, None, work)
        assert threading.active_count() == before + work.get("cores", 1)
        assert set(handlers.stop()) == figures.get(kind, set())
        assert threading.active_count() == before
    handlers = NeighbourHandlers()
    handlers.start("memory", None, {"bytes": 1 << 60})
    assert "error" in handlers.stop()
    with RunningNeighbour(Neighbour(name="film", kind="video", work=WORK["video"])) as running:
        psutil.Process(running.pid).kill()
        found = running.stop()
    assert "the process" in found["error"]
    assert found["frame_ms"] is None
