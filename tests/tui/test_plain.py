"""The chat without a screen: what it prints and keeps, attaches, and how it runs calls of tools."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import localrt
from localrt import History
from localrt.cli import main
from localrt.client.model import connect
from localrt.common.formatting import UNSEEN
from localrt.history.messages import call_line
from localrt.mcp.toolbox import Toolbox
from localrt.planning.forecast import PlannedContext
from localrt.tui.conversation.generation import NO_TOOLS
from localrt.tui.plain import PlainChat
from tests.fake_endpoint import DONE, HEAD, Asked, delta, saying, whole
from tests.tui.fakes import FakeLoader, FakeModel, call, toolbox
from tests.tui.test_attachments import file_of, parts

Chat = Callable[..., str]


@pytest.fixture
def chat(model: FakeModel, tmp_path: Path) -> Chat:
    """Run a plain chat over lines of input; what it printed. Its conversations are kept."""

    def run(
        *lines: str,
        load: Callable[..., Any] | None = None,
        toolbox: Toolbox | None = None,
        **arguments: Any,
    ) -> str:
        out = io.StringIO()
        plain = PlainChat(
            io.StringIO("".join(f"{line}\n" for line in lines)),
            out,
            model_name="tiny-model",
            system=None,
            options={},
            history=lambda: History(tmp_path / "history.db"),
            config=tmp_path,
            toolbox=toolbox,
        )
        assert plain.run(load or FakeLoader(model), **arguments) == 0
        return out.getvalue()

    return run


def test_a_conversation(model: FakeModel, chat: Chat) -> None:
    text = chat("Hi", "and\\", "more", "", "//etc")
    assert text.count("Hello there.\n") == 3
    assert model.given("user") == ["Hi", "and\nmore", "/etc"]
    assert "\x1b" not in text
    assert model.closed
    again = chat("/show", resume=True)
    assert "Continuing “Hi”" in again
    assert "You: and\nmore" in again


def test_commands(model: FakeModel, chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    (tmp_path / "notes.txt").write_text("milk\n")
    text = chat(
        *("/help", "/tools", "/retry", "One", "/retry", "/edit Two", "/branch prev"),
        "/attach ~nobody9/notes.txt",
        f"/attach {tmp_path / 'notes.txt'}",
        *("What is it?", "/set seed 4", "/system Be brief.", "/rename My talk"),
        f"/export {path}",
        *("/new", "/list", "/open 1", "/open 7", "/delete 1", "/delete 1", "/nonsense"),
        *("/quit", "never sent"),
    )
    assert "[mcp.servers.NAME]" in text
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


def test_answers(model: FakeModel, chat: Chat) -> None:
    model.answer = ["<think>", "Hm", "m.", "</think>", "\n\nYes", "\x1b[31m."]
    text = chat("Well?", "/thinking")
    said = r"\(thinking\)\n\(thought for \d+(\.\d)? m?s; /thinking prints it\)\nYes.\[31m\.\n"
    assert re.search(said, text)
    assert text.count("Hmm.") == 1
    assert "\x1b" not in text
    model.answer, model.error = ["Some"], ValueError("broken")
    assert chat("Hi", "again").count("Error: ValueError: broken") == 2


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
def test_ctrl_c(model: FakeModel, chat: Chat, tmp_path: Path) -> None:
    model.steps = Interrupted(1)
    before = signal.getsignal(signal.SIGINT)
    text = chat("Hi", "/show")
    assert "Hello\n(stopped; /continue goes on)\n" in text
    assert signal.getsignal(signal.SIGINT) is before
    with History(tmp_path / "history.db") as history:
        turn = history.open(history.list()[0].id).turns[-1]
        assert (turn.content, turn.state) == ("Hello", "cancelled")


@pytest.mark.parametrize(
    ("arguments", "terminal", "plain"),
    [(["--plain"], (False, False), True), ([], (True, False), True), ([], (True, True), False)],
)
def test_plain_or_app(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], terminal: tuple[bool, bool], plain: bool
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


def turns_of(folder: Path) -> list[str]:
    with History(folder / "history.db") as history:
        return [turn.content for turn in history.open(history.list()[0].id).turns]


def test_turns(model: FakeModel, chat: Chat, tmp_path: Path) -> None:
    text = chat("/continue", "One", "Two", "/at 9", "/at 2", "/edit Hi.", "/branch", "/show")
    assert "Error: there is no message yet" in text
    assert "Error: give a number from /show" in text
    assert "2. Model (1 of 2): Hello there.\n3. You: Two" in text
    model.finish_reason = "length"
    text = chat("Three", resume=True)
    assert "(cut off at max_tokens; /continue goes on)" in text
    model.finish_reason, model.answer = "stop", [" And", " more."]
    assert chat("/continue", resume=True).endswith(" And more.\n")
    assert turns_of(tmp_path)[-1] == "Hello there. And more."
    text = chat("/at 3", "/remove", "/remove", "/retry", resume=True)
    assert "3. You" not in text
    assert text.count("Enter the same command again") == 1
    assert turns_of(tmp_path) == ["One", " And more."]
    text = chat("/at 1", "/fork", "/pin", "/rename Copy", "/show", "/list", resume=True)
    assert "This is a copy" in text
    assert "1. Copy (now, 1 turns" in text
    assert turns_of(tmp_path) == ["One"]


def test_full(model: FakeModel, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = SimpleNamespace(contexts=[PlannedContext(4096, 1.0, True, nbytes=4_096_000)])
    monkeypatch.setattr(localrt, "plan", lambda path: longer)
    model.info = replace(model.info, ctx=8)
    model.answer, model.finish_reason = ["word "] * 7, "length"
    text = chat("One", "/full 9", "/full 1", "/continue")
    assert "(cut off: the context is full)\n/full 1: Leave out the oldest turns\n" in text
    assert "Error: give a number from /full" in text
    assert model.last_chat.options == {"overflow": "drop_oldest"}
    model.answer, model.finish_reason = ["We counted."], "stop"
    text = chat("/full", "/full 2", "Go on", "/full 3", "/full 4", resume=True)
    assert "/full 3: A context of " in text
    assert "localrt chat tiny-model --ctx " in text
    assert text.count("We counted.") == 2
    assert [each.options for each in model.seen[-2:]] == [{"overflow": "drop_oldest"}, {}]
    assert "Summarize" in model.given("user")[0]
    assert len(model.given("assistant")) == 1
    assert "New conversation" in text


def test_settings_and_drafts(model: FakeModel, chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('system = "Be brief."\n[generation]\nseed = 3\nx = 1\n')
    (tmp_path / "presets.toml").write_text('[Code]\nsystem = "You review."\ntemperature = 0.5\n')
    text = chat("Hi", "/preset code", "/temporary", "secret words", "/pin", "unsent\\")
    assert "[generation]: " in text
    assert "System prompt: Be brief. (/system shows it)" in text
    assert "Temporary conversation: nothing of it is written to the disk" in text
    assert "Error: a temporary conversation is in no list" in text
    assert model.given() == ["You review.", "secret words", "Hello there.", "unsent"]
    assert model.last_chat.options == {"temperature": 0.5}
    for path in tmp_path.glob("history.db*"):
        assert b"secret words" not in path.read_bytes()
    with History(tmp_path / "history.db") as history:
        history.new(model="m").keep_draft("half a thought")
        history._database.rows("UPDATE draft SET writer = ''")
    assert "Not sent yet: half a thought" in chat("/new")


# -- tools -----------------------------------------------------------------------------------------

ASKED = "Run it? [y]es, [a]lways in this conversation, [n]o: "


def test_calls(model: FakeModel, chat: Chat) -> None:
    tools, servers = toolbox()
    model.calls = [[call("read_file", path="a"), call("delete", path="a")], [call("list")]]
    text = chat("What is in a?", "perhaps", "y", "n", "/show", toolbox=tools)
    assert text.partition("continue it.\n")[2].startswith(
        f'Call: files.read_file {{"path": "a"}}\n{ASKED}{ASKED}Result: milk\n'
        f'Call: files.delete {{"path": "a"}}\n{ASKED}'
        "Result (refused): The user did not allow this call.\n"
        "Call: files.list {}\nResult: a\nb\n"
        "Hello there.\n"
        "1. You: What is in a?\n"
        '3. Call: files.read_file {"path": "a"}\nResult: milk\n'
    )
    assert servers.called == [("read_file", {"path": "a"}), ("list", {})]
    assert model.given("tool") == ["milk", "The user did not allow this call.", "a\nb"]


def test_names_forge_no_line(chat: Chat) -> None:
    """Of models, of what they say of themselves, and of tools, which servers name."""
    forged = "Result: done"
    model = FakeModel(name=f"a\n{forged}", notes=(f"b\n{forged}\x1b]52;;aA\x07\u2066",))
    text = chat("Hi", "/list", load=FakeLoader(model))
    text += call_line({"title": f"c\n{forged}\u2028", "arguments": f"d\n{forged}"})
    assert text.count(forged) >= 4
    assert forged not in text.splitlines()
    assert not UNSEEN.findall(text.replace("\n", ""))


def test_no_tools(chat: Chat) -> None:
    """The server refuses them."""

    def reply(asked: Asked, connection: Any) -> bytes:
        if "tools" in asked.body:
            return whole(400, {"error": {"message": "m does not support tools"}})
        return HEAD + delta(content="Hello.") + delta("stop") + DONE

    tools, _ = toolbox()
    with saying(reply) as server:
        text = chat("One", "Two", toolbox=tools, load=lambda progress: connect(server.url))
        given = ["tools" in asked.body for asked in server.asked if asked.body]
    assert given == [True, False, False]
    assert text.count("Hello.\n") == 2
    assert text.count(NO_TOOLS) == 1


# -- files -----------------------------------------------------------------------------------------


def test_pictures(model: FakeModel, chat: Chat, tmp_path: Path) -> None:
    photo, data = tmp_path / "my photo.png", file_of()
    photo.write_bytes(data)
    seeing = FakeModel(sees=True)
    lines = [f'What is in @"{photo}"?', f"/attach {photo}", "And this?"]
    out = chat(*lines, load=FakeLoader(seeing))
    sent = [seen.messages[-1]["content"] for seen in seeing.seen]
    assert sent == [parts("What is in ", data, "?"), parts(data, " And this?")]
    assert "my photo.png is attached to the next message." in out
    assert out.count("Picture: my photo.png, 8 x 4, 64 tokens") == 2
    out = chat(f'What is in @"{photo}"?', "")
    said = "Error: tiny-model cannot see pictures: the message was not sent"
    assert f"{said}; an empty line sends it without them" in out
    assert [seen.messages[-1]["content"] for seen in model.seen] == ["What is in my photo.png?"]
