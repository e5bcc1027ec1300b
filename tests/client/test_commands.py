"""``--endpoint``: the commands and the app with a model of a server; servers that they find."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from localrt.cli import main
from localrt.client.model import connect
from localrt.client.servers import LocalServer, announced, local_servers
from localrt.common.processes import own_name
from localrt.common.settings import Settings
from tests.client.conftest import KEY
from tests.fake_endpoint import fake, listed
from tests.server.conftest import Running
from tests.tui import screen
from tests.tui.conftest import SIZE, until
from tests.tui.screen import idle


def test_one_answer_on_stdout(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["--endpoint", server.url, "--max-tokens", "4", "--temperature", "0"]
    assert main(["run", "tiny", "hi", *fast, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["finish_reason"]) == ("tiny", "length")
    assert record["metrics"]["completion_tokens"] == 4
    assert main(["run", "tiny", "-c", "go on", *fast, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "answer 4 tokens" in err
    assert main(["chat", "-p", "hi", *fast]) == 0
    assert capsys.readouterr().out.strip() == record["text"].strip()


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["--endpoint", "nonsense"], 2, "must be a URL"),
        (["--endpoint", "http://h", "--ram", "4GB"], 2, "--ram is for models on this machine"),
        (["--endpoint", "http://h", "--draft", "ngram"], 2, "--draft"),
        (["--api-key", KEY], 2, "--api-key needs --endpoint"),
        (["--endpoint", "http://127.0.0.1:1"], 1, "nothing listens"),
    ],
)
def test_bad_usage_is_one_line(
    args: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "m", "hi", *args]) == status
    error = capsys.readouterr().err
    assert error.startswith("localrt: ")
    assert error.count("\n") == 1
    assert said in error
    assert KEY not in error


async def test_the_app_chats_through_it(server: Running) -> None:
    from localrt.tui import ChatApp

    app = ChatApp(
        lambda progress: connect(server.url, progress=progress),
        model_name="127.0.0.1",
        system=None,
        options={"temperature": 0.0, "max_tokens": 6},
    )
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: len(screen.answers(app)) == 1 and idle(app))
        assert all(screen.answers(app))
        assert "tiny · remote · ready" in screen.footer(app)
        assert "of 512" in screen.footer(app)


def test_models_of_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}
    monkeypatch.setattr("localrt.tui.run_chat", lambda load, **given: opened.update(given) or 0)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with fake(lambda asked, connection: listed("a", "b", max_model_len=4096)) as server:
        assert main(["chat", "--endpoint", f"{server.url}/v1"]) == 0
        assert opened["list_models"]() == [("a", "context 4,096"), ("b", "context 4,096")]
        model = opened["load_by_name"]("b", lambda progress: None)
        assert (model.name, model.info.engine) == ("b", "remote")
        model.close()


# -- servers of this user --------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return Settings.from_environment()


def test_announced_server(settings: Settings) -> None:
    server = LocalServer("http://127.0.0.1:1/v1", os.getpid(), "s3cret", {"tiny": "/a/tiny"})
    with announced(server, settings):
        assert local_servers(settings) == [server]
        (file,) = (settings.data_dir / "servers").iterdir()
        assert os.name == "nt" or file.stat().st_mode & 0o077 == 0
        assert "s3cret" not in repr(server)
    assert local_servers(settings) == []


@pytest.mark.parametrize(
    ("changed", "listed", "stays"),
    [
        ({}, True, True),
        ({"process": None}, False, False),
        ({"process": "1@0.00"}, False, False),
        ({"process": "{id}+1+{place}+{now}"}, False, False),
        ({"process": "{id}+1+1+{boot}+{now}"}, False, True),  # in another container
        ({"process": "{id}+1+1+{boot}+1"}, False, False),
        ({"port": 1}, False, True),
    ],
    ids=str,
)
def test_servers_that_are_found(
    settings: Settings, changed: dict[str, Any], listed: bool, stays: bool
) -> None:
    number, _, *place, now = (own_name() or "").split("+")
    parts = {"id": number, "place": "+".join(place), "boot": "+".join(place[1:]), "now": now}
    server = LocalServer("http://127.0.0.1:1/v1", os.getpid(), process=own_name())
    written = {**asdict(server), **changed}
    if written["process"] is not None:
        written["process"] = written["process"].format(**parts)
    folder = settings.data_dir / "servers"
    folder.mkdir(parents=True)
    (folder / "2.json").write_text(json.dumps(written))
    (folder / "1.json").write_text("{")
    assert local_servers(settings) == [server] * listed
    assert (folder / "2.json").exists() == stays


def test_servers_with_the_same_id(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers, in which they are the first process."""
    first, second = (LocalServer(f"http://127.0.0.1:{n}/v1", 1) for n in (1, 2))
    with announced(first, settings):
        other = (own_name() or "").replace("+", "+1+", 1)
        monkeypatch.setattr("localrt.client.servers.own_name", lambda: other)
        with announced(second, settings):
            assert len(list((settings.data_dir / "servers").iterdir())) == 2
        assert local_servers(settings) == [first]
