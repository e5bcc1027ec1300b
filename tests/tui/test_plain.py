"""The chat without a screen: what it prints and keeps, and how it runs calls of tools."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from localrt import History
from localrt.cli import main
from localrt.client.model import connect
from localrt.mcp.config import Tool, ToolResult
from localrt.mcp.toolbox import Toolbox
from localrt.tui.conversation.generation import NO_TOOLS
from tests.fake_endpoint import DONE, HEAD, Asked, delta, saying, whole
from tests.tui.conftest import plain_chat
from tests.tui.fakes import FakeLoader, FakeModel, FakeServers, call, toolbox


@pytest.fixture
def chat(model: FakeModel, tmp_path: Path) -> Callable[..., str]:
    """Run a plain chat over lines of input; what it printed."""

    def run(*lines: str, load: Callable[..., Any] | None = None, **arguments: Any) -> str:
        return plain_chat(load or FakeLoader(model), tmp_path, lines, **arguments)

    return run


def test_a_conversation(model: FakeModel, chat: Callable[..., str], tmp_path: Path) -> None:
    text = chat("Hi", "and\\", "more", "", "//etc")
    assert text.count("Hello there.\n") == 3
    assert model.given("user") == ["Hi", "and\nmore", "/etc"]
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
        "/attach ~nobody9/notes.txt",
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
    assert re.search("Error: .*~nobody9/notes.txt: No such file", text)
    assert "Error: give a number" in text
    assert "Deleted." in text
    assert "Error: no command /nonsense" in text
    record = json.loads(path.read_text("utf-8"))
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


SERVER = Path(__file__).parent.parent / "mcp" / "server.py"


def test_calls(model: FakeModel, chat: Callable[..., str]) -> None:
    tools, servers = toolbox()
    model.calls = [[call("read_file", path="a"), call("delete", path="a")], [call("list")]]
    text = chat("What is in a?", "perhaps", "y", "n", "/show", toolbox=tools)
    assert text.partition("continue it.\n")[2].startswith(
        'Call: files.read_file {"path": "a"}\n'
        "Run it? [y]es, [a]lways in this conversation, [n]o: "
        "Run it? [y]es, [a]lways in this conversation, [n]o: Result: milk\n"
        'Call: files.delete {"path": "a"}\n'
        "Run it? [y]es, [a]lways in this conversation, [n]o: "
        "Result (refused): The user did not allow this call.\n"
        "Call: files.list {}\n"
        "Result: a\nb\n"
        "Hello there.\n"
        "You: What is in a?\n"
        'Call: files.read_file {"path": "a"}\nResult: milk\n'
    )
    assert servers.called == [("read_file", {"path": "a"}), ("list", {})]
    assert model.given("tool") == ["milk", "The user did not allow this call.", "a\nb"]


def test_always_and_end_of_input(model: FakeModel, chat: Callable[..., str]) -> None:
    tools, servers = toolbox()
    model.calls = [[call("read_file", path="a")], [call("read_file", path="b")], [call("delete")]]
    text = chat("Go", "a", toolbox=tools)
    assert text.count("Run it?") == 2
    assert [name for name, _ in servers.called] == ["read_file", "read_file"]
    assert model.given("tool")[-1] == "The user did not allow this call."


class Interrupting(Future[ToolResult]):
    """Ctrl+C is pressed when somebody looks whether it is done."""

    pressed = False

    def done(self) -> bool:
        if not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().done()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_stops_call(model: FakeModel, chat: Callable[..., str]) -> None:
    class Servers(FakeServers):
        def call(self, tool: Tool, arguments: Mapping[str, Any], *, most: int) -> Interrupting:
            return Interrupting()

    model.calls = [[call("list")]]
    text = chat("Go", toolbox=Toolbox(Servers()))
    assert "Result (stopped): The user stopped this call.\nHello there.\n" in text


def test_model_without_tools(model: FakeModel, chat: Callable[..., str]) -> None:
    model.takes_tools = False
    assert chat("One", "Two", toolbox=toolbox()[0]).count(NO_TOOLS) == 1


def test_tools_of_a_real_server(model: FakeModel, chat: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    config = f"command = '{sys.executable}'\nargs = ['{SERVER}']\nallow = ['add']\n"
    if where := os.environ.get("PYTHONPATH"):
        config += f"env = {{PYTHONPATH = '{where}'}}\n"
    (tmp_path / "config.toml").write_text(f"[mcp.servers.tests]\n{config}")
    tools = Toolbox.open(tmp_path)
    try:
        model.calls = [[call("add", a=2, b=3), call("fail", why="rain")], [call("end")]]
        text = chat("Go", "y", "y", toolbox=tools)
    finally:
        tools.close()
    assert 'Call: tests.add {"a": 2, "b": 3}\nResult: 5\n' in text
    assert model.given("tool")[1] == "Error executing tool fail"
    assert len(model.given("tool")) == 3, text
    assert "out of cheese" in model.given("tool")[2]
    assert text.count("Run it?") == 2


def test_server_refuses_tools(chat: Callable[..., str]) -> None:
    def reply(asked: Asked, connection: socket.socket) -> bytes:
        if "tools" in asked.body:
            return whole(400, {"error": {"message": "m does not support tools"}})
        return HEAD + delta(content="Hello.") + delta("stop") + DONE

    tools, _ = toolbox()
    with saying(reply) as server:
        text = chat("One", "Two", toolbox=tools, load=lambda progress: connect(server.url))
        assert ["tools" in asked.body for asked in server.asked if asked.body] == [
            True,
            False,
            False,
        ]
    assert text.count("Hello.\n") == 2
    assert text.count(NO_TOOLS) == 1
