"""The chat without a screen: what it prints, what it keeps, and that it sends no cursor moves."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localrt import History
from localrt.cli import main
from tests.tui.conftest import plain_chat
from tests.tui.fakes import FakeLoader, FakeModel


@pytest.fixture
def chat(model: FakeModel, tmp_path: Path) -> Callable[..., str]:
    """Run a plain chat over lines of input; what it printed."""

    def run(*lines: str, load: Callable[..., Any] | None = None, **arguments: Any) -> str:
        return plain_chat(load or FakeLoader(model), tmp_path, lines, **arguments)

    return run


def test_a_conversation(model: FakeModel, chat: Callable[..., str], tmp_path: Path) -> None:
    text = chat("Hi", "and\\", "more", "", "//etc")
    assert text.count("Hello there.\n") == 3
    assert [m["content"] for m in model.last_chat.messages if m["role"] == "user"] == [
        "Hi",
        "and\nmore",
        "/etc",
    ]
    assert "\x1b" not in text
    assert model.closed
    again = chat("/show", resume=True)
    assert "Continuing “Hi”" in again
    assert "You: and\nmore" in again


def test_commands(model: FakeModel, chat: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    (tmp_path / "notes.txt").write_text("milk\n")
    text = chat(
        "/help",
        "/retry",
        "One",
        "/retry",
        "/edit Two",
        "/branch prev",
        f"/attach {tmp_path / 'notes.txt'}",
        "What is it?",
        "/set seed 4",
        "/system Be brief.",
        "/rename My talk",
        f"/export {path}",
        "/new",
        "/list",
        "/open 1",
        "/open 7",
        "/delete 1",
        "/delete 1",
        "/nonsense",
        "/quit",
        "never sent",
    )
    assert "Error: there is no message yet" in text
    assert "You (1 of 2): One" in text
    assert "1. My talk (now" in text
    assert "Error: give a number" in text
    assert "Deleted." in text
    assert "Error: no command /nonsense" in text
    record = json.loads(path.read_text())
    assert record["options"] == {"seed": 4}
    assert [m["content"] for m in record["messages"]][:1] == ["Be brief."]
    assert record["messages"][3]["content"] == "notes.txt:\n```txt\nmilk\n```\n What is it?"
    assert "never sent" not in json.dumps(model.last_chat.messages)


def test_thinking(model: FakeModel, chat: Callable[..., str]) -> None:
    model.answer = ["<think>", "Hm", "m.", "</think>", "\n\nYes", "."]
    text = chat("Well?", "/thinking")
    said = r"\(thinking\)\n\(thought for \d+(\.\d)? m?s; /thinking prints it\)\nYes\.\n"
    assert re.search(said, text)
    assert text.count("Hmm.") == 1


def test_control_characters(model: FakeModel, chat: Callable[..., str]) -> None:
    model.answer = ["a\x1b[31mb"]
    assert "\x1b" not in chat("Hi")


def test_errors(model: FakeModel, chat: Callable[..., str]) -> None:
    model.answer, model.error = ["Some"], ValueError("broken")
    text = chat("Hi", "again")
    assert text.count("Error: ValueError: broken") == 2


class Interrupted(threading.Semaphore):
    """Ctrl+C is pressed when a piece is first waited for: what came before is printed by then."""

    pressed = False

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        there = super().acquire(blocking, timeout)
        if not there and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return there


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c(model: FakeModel, chat: Callable[..., str], tmp_path: Path) -> None:
    model.steps = Interrupted(1)
    before = signal.getsignal(signal.SIGINT)
    text = chat("Hi", "/show")
    assert "Hello\n(stopped)\n" in text
    assert signal.getsignal(signal.SIGINT) is before
    with History(tmp_path / "history.db") as history:
        turn = history.open(history.list()[0].id).turns[-1]
        assert (turn.content, turn.state) == ("Hello", "cancelled")


def test_continue_or_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--plain", "-c", "--load", "x.json"]) == 2
    assert "either --continue or --load" in capsys.readouterr().err
    assert main(["chat", "-p", "Hi", "-c"]) == 2
    assert "localrt run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "terminal", "plain"),
    [
        (["--plain"], (False, False), True),
        ([], (True, False), True),
        ([], (True, True), False),
    ],
)
def test_plain_or_app(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    terminal: tuple[bool, bool],
    plain: bool,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: terminal[0], raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal[1], raising=False)
    monkeypatch.setattr("localrt.tui.run_chat", lambda load, **_: opened.append("app") or 0)
    monkeypatch.setattr(
        "localrt.tui.plain.run_plain", lambda load, **_: opened.append("plain") or 0
    )
    assert main(["chat", *arguments]) == 0
    assert opened == ["plain" if plain else "app"]


def test_tools_are_listed(model: FakeModel, chat: Callable[..., str]) -> None:
    assert "[mcp.servers.NAME]" in chat("/tools")
