"""Slash commands: how they are read, and what each does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrt.engine.options import OPTION_NAMES
from localrt.tui.app import ChatApp
from localrt.tui.chat.screen import ChatScreen
from localrt.tui.commands import (
    COMMANDS,
    PLAIN_COMMANDS,
    Command,
    completion,
    read_line,
    suggestions,
)
from localrt.tui.plain import PlainChat
from localrt.tui.screens.dialogs import HelpScreen, help_page
from localrt.tui.text import OPTIONS
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeLoader, FakeModel
from tests.tui.screen import idle


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("hello /set", "hello /set"),
        ("//etc/hosts", "/etc/hosts"),
        ("/help", Command("help", "")),
        ("/SET  temperature   0.2 ", Command("set", "temperature   0.2")),
        ("/system Be brief.\nBe kind.", Command("system", "Be brief.\nBe kind.")),
        ("/", Command("", "")),
        ("/ ", Command("", "")),
    ],
)
def test_reading(typed: str, read: Command | str) -> None:
    assert read_line(typed) == read


def labels(text: str) -> list[str]:
    return [item.label for item in suggestions(text)]


def test_suggestions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert labels("/") == [entry.usage for entry in COMMANDS]
    assert labels("/ren") == ["/rename TITLE"]
    assert labels("/rename my") == ["/rename TITLE"]
    assert labels("/set top") == ["top_k", "top_p"]
    assert labels("//s") == labels("s") == labels("/x") == labels("/system a\nb") == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "novel").mkdir()
    assert labels("/attach no") == ["notes.txt", "novel/"]
    for path in ("nowhere/x", "~nobody9/x"):
        assert labels(f"/attach {path}") == ["/attach [PATH]"]


def test_completion() -> None:
    assert completion("/ne") == "w"
    assert completion("/lo") == "ad "
    assert completion("/set te") == "mperature "
    assert completion("/new") == completion("/") == completion("/set ") == ""
    assert completion("cl") == completion("") == completion("//cl") == ""


def test_every_command_has_its_work() -> None:
    for entry in COMMANDS:
        room, _, action = (entry.action or entry.name).rpartition(".")
        assert entry.run or hasattr(ChatApp if room else ChatScreen, f"action_{action}")
    for entry in PLAIN_COMMANDS:
        assert entry.run or hasattr(PlainChat, f"_do_{entry.name}")


def test_options_listed() -> None:
    not_in_the_app = {"context_tokens", "logprobs", "min_indent", "line_seconds"}
    not_in_the_app |= {"tool_choice", "parallel_tool_calls"}
    assert set(OPTIONS) == set(OPTION_NAMES) - not_in_the_app


def test_help() -> None:
    text = help_page().plain
    assert all(entry.usage in text for entry in COMMANDS)
    assert "Ctrl+O" in text


async def test_commands_without_a_model(model: FakeModel) -> None:
    model.hold()
    loader = FakeLoader(model, held=True)
    async with running(loader, ready=False) as (app, pilot):
        await screen.say(pilot, "/help")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        await screen.say(pilot, "/tmp/file is what?")
        assert screen.notices(app, "error")[0].startswith("No command /tmp/file: /help")
        assert screen.users(app) == []
        await screen.say(pilot, "/set temperature 0.3")
        await screen.say(pilot, "/system Be brief.")
        assert screen.notices(app)[-1] == "/system runs when the model is ready"
        loader.gate.set()
        await until(pilot, lambda: idle(app))
        assert model.last_chat.options == {"temperature": 0.3}
        assert model.last_chat.system == "Be brief."
        await screen.say(pilot, "//etc is what?")
        assert screen.users(app) == ["/etc is what?"]
        await screen.say(pilot, "/regenerate")  # another name of /retry
        assert "Esc stops it" in screen.notices(app, "error")[-1]
        assert screen.composer(app).text == "/retry"  # not lost
        screen.composer(app).put("")
        await screen.say(pilot, "/clear")  # the old name of /new
        assert "will open when this answer ends" in screen.notices(app)[-1]
        assert screen.users(app) == ["/etc is what?"]
        model.release()
        await until(pilot, lambda: screen.users(app) == [] and idle(app))


async def test_system_and_set(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        await screen.say(pilot, "/system")
        assert screen.notices(app)[-1] == "No system prompt: /system TEXT sets one"
        await screen.say(pilot, "/system Be brief.\nBe kind.")
        assert model.last_chat.system == "Be brief.\nBe kind."
        await screen.say(pilot, "/system")
        shown = "System prompt (/system none removes it): Be brief.\nBe kind."
        assert screen.notices(app)[-1] == shown
        await screen.say(pilot, "/system none")
        assert model.last_chat.system is None

        await screen.say(pilot, "/set max-tokens 40")
        await screen.say(pilot, "/set stop 5")
        await screen.say(pilot, "/set ignore_eos true")
        assert model.last_chat.options == {"max_tokens": 40, "stop": "5", "ignore_eos": True}
        await screen.say(pilot, "/set")
        listing = [" ".join(line.split()) for line in screen.notices(app)[-1].splitlines()]
        assert "max_tokens 40" in listing
        assert "temperature 0.2 (default)" in listing
        assert "seed -" in listing
        await screen.say(pilot, "/set thinking off")
        assert screen.notices(app)[-1] == "thinking = off"
        for name in ("thinking", "max_tokens", "stop"):
            await screen.say(pilot, f"/set {name} none")
        assert model.last_chat.options == {"ignore_eos": True}
        assert screen.notices(app, "error") == []
        for count, line in enumerate(
            ("temperature -1", "tempertaure 1", "foo 1", "top_p", "thinking perhaps"), 1
        ):
            await screen.say(pilot, f"/set {line}")
            assert len(screen.notices(app, "error")) == count
            assert len(screen.notices(app, "error")[-1]) < 120
            assert model.last_chat.options == {"ignore_eos": True}


async def test_new_export_and_load(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, markdown = tmp_path / "chat.json", tmp_path / "notes.txt"
    markdown.write_text("mine")
    model.answer = ["<think>hm</think>", "# Yes\n"]
    async with running(model, system="Be brief.") as (app, pilot):
        await asked(pilot, "Really?")
        await screen.say(pilot, f"/export {path}")
        await until(pilot, path.exists)
        await screen.say(pilot, f"/export {markdown}")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert markdown.read_text("utf-8") == "mine"  # another's file is asked about first
        await screen.say(pilot, f"/export {markdown}")
        await until(pilot, lambda: markdown.read_text("utf-8") != "mine")
        await screen.say(pilot, "/export")
        await until(pilot, lambda: list(tmp_path.glob("really-20*.md")))

        await screen.say(pilot, "/new")
        await until(pilot, lambda: not screen.users(app))
        assert screen.answers(app) == screen.notices(app, "error") == []
        assert model.last_chat.messages == [{"role": "system", "content": "Be brief."}]
        await until(pilot, lambda: model.chats[0].closed)
        assert "context 0 of 8.2k" in screen.footer(app)

        await screen.say(pilot, f"/load {path}")
        await until(pilot, lambda: screen.users(app) == ["Really?"])
        assert app.state.conversation.system == "Be brief."
        await asked(pilot, "again")
        await screen.say(pilot, f"/export {path}")  # its own file: no question
        await until(pilot, lambda: len(json.loads(path.read_text("utf-8"))["messages"]) == 5)
        assert screen.notices(app, "error") == []
        for line in ("/load nowhere/chat.json", "/load"):
            count = len(screen.notices(app, "error"))
            await screen.say(pilot, line)
            await until(pilot, lambda n=count: len(screen.notices(app, "error")) > n)  # type: ignore[misc]
            assert screen.users(app) == ["Really?", "again"]
    lines = markdown.read_text("utf-8").splitlines()
    assert lines[0] == "# Really?"
    assert lines[2].startswith("*tiny-model, 20")
    assert [line for line in lines[3:] if line] == [
        "## System prompt",
        "Be brief.",
        "## You",
        "Really?",
        "## Model",
        "<details><summary>Thinking</summary>",
        "hm",
        "</details>",
        "# Yes",
    ]


async def test_open_saved_chat(model: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    path.write_text(json.dumps({"messages": said, "options": {"top_k": 3}}))
    loader = FakeLoader(model, held=True)
    async with running(
        loader, ready=False, chat_path=path, system="Be brief.", options={"seed": 1}
    ) as (app, pilot):
        await screen.say(pilot, "written while it loads")
        loader.gate.set()
        await until(pilot, lambda: screen.answers(app) == ["Yes?", "Hello there."])
        assert screen.users(app) == ["Hi", "written while it loads"]
        assert model.last_chat.system == "Be brief."
        assert model.last_chat.options == {"seed": 1, "top_k": 3}


async def test_missing_saved_chat(model: FakeModel, tmp_path: Path) -> None:
    async with running(model, chat_path=tmp_path / "none.json") as (app, pilot):
        await until(pilot, lambda: screen.notices(app, "error"))
        assert "none.json" in screen.notices(app, "error")[0]
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."])
