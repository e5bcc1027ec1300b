"""Answers that call tools: shown, asked about, run, told to the model, kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from localrt.common.errors import LocalrtError
from localrt.mcp import ROUNDS
from localrt.tui import ChatApp
from localrt.tui.chat.bars import Phase
from localrt.tui.conversation.generation import NO_TOOLS, ROUNDS_OVER
from localrt.tui.screens.dialogs import AskCall, HelpScreen
from tests.tui import screen
from tests.tui.conftest import Opening, asked, cleared, running, until
from tests.tui.fakes import FakeModel, call, toolbox

READ = 'files.read_file {"path": "a"}'
REFUSED, STOPPED = "The user did not allow this call.", "The user stopped this call."


async def asked_about(pilot: Pilot[Any], text: str) -> AskCall:
    """Send a message, and wait for the question about a call."""
    await screen.say(pilot, text)
    await until(pilot, lambda: isinstance(pilot.app.screen, AskCall))
    assert isinstance(pilot.app.screen, AskCall)
    return pilot.app.screen


async def answered(pilot: Pilot[Any], app: ChatApp) -> None:
    await until(pilot, lambda: screen.answers(app)[-1:] == ["Hello there."] and screen.idle(app))


async def test_asked_about(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, servers = toolbox()
    model.calls = [[call("read_file", path="a")]]
    async with running(model, toolbox=tools) as (app, pilot):
        await asked_about(pilot, "What is in a?")
        assert screen.phase(app) is Phase.TOOLS
        assert screen.calls(app) == [(READ, "", "waits for you to allow it")]
        assert servers.called == []
        await pilot.press("y")
        await answered(pilot, app)
        assert screen.calls(app) == [(READ, "milk", "")]
        assert servers.called == [("read_file", {"path": "a"})]
        assert screen.shown(app).splitlines()[-6:] == [
            *("What is in a?", "", f"▸ {READ}", "  milk", "", "Hello there.")
        ]
        offered = [tool["function"]["name"] for tool in model.seen[0].tools]
        assert offered == [tool.name for tool in servers.tools]
        question, answer, result = model.seen[1].messages
        assert question == {"role": "user", "content": "What is in a?"}
        wanted = {"name": "read_file", "arguments": '{"path": "a"}'}
        assert answer["tool_calls"][0]["function"] == wanted
        id = answer["tool_calls"][0]["id"]
        assert result == {"role": "tool", "content": "milk", "tool_call_id": id}

        # Refused.
        servers.called.clear()
        for key in ("n", "escape"):
            await cleared(pilot)
            model.calls = [[call("read_file", path="a")]]
            await asked_about(pilot, "What is in a?")
            await pilot.press(key)
            await answered(pilot, app)
            assert screen.calls(app)[0][2] == "not allowed"
            assert model.given("tool") == [REFUSED]
        assert servers.called == []

        # Allowed for this tool, in this conversation.
        await cleared(pilot)
        model.calls = [[call("read_file", path="a"), call("read_file", path="b")]]
        await asked_about(pilot, "What is in a and b?")
        await pilot.press("a")
        await answered(pilot, app)
        model.calls = [[call("delete", path="a")]]
        await asked_about(pilot, "Delete a")
        await pilot.press("n")
        await until(pilot, lambda: screen.idle(app))
        assert servers.called == [("read_file", {"path": "a"}), ("read_file", {"path": "b"})]

        # A question waits for the window that is open.
        await cleared(pilot)
        servers.called.clear()
        model.calls = [[call("read_file", path="a")]]
        model.hold()
        await screen.say(pilot, "What is in a?")
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        model.release()
        await until(pilot, lambda: "waits for you to allow it" in screen.marks(app))
        await pilot.press("y")
        assert isinstance(app.screen, HelpScreen)
        now = 100.0
        monkeypatch.setattr("localrt.tui.screens.dialogs._QUIET_SECONDS", 0.5)
        monkeypatch.setattr("localrt.tui.screens.dialogs.monotonic", lambda: now)
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, AskCall))
        # Keys of somebody who goes on typing are no answer.
        for seconds in (0.4, 0.8, 1.2):
            now = 100 + seconds
            await pilot.press("y")
        assert isinstance(app.screen, AskCall)
        assert servers.called == []
        now = 101.8
        await pilot.press("y")
        await answered(pilot, app)
        assert servers.called == [("read_file", {"path": "a"})]


async def test_order_of_calls(model: FakeModel) -> None:
    tools, servers = toolbox()
    servers.results["list"] = None
    model.calls = [[call("list"), call("read_file", path="a"), call("nonsense")]]
    async with running(model, toolbox=tools) as (app, pilot):
        await screen.say(pilot, "Go")
        await until(pilot, lambda: servers.running)
        marks = [mark for _, _, mark in screen.calls(app)]
        assert marks == ["runs; Esc stops it", "waits", "waits"]
        servers.running[0].set_result(replace(servers.results["delete"], text="No\x1b[1m file."))  # type: ignore[type-var]
        await until(pilot, lambda: isinstance(app.screen, AskCall))
        await pilot.press("y")
        await answered(pilot, app)
        assert [mark for _, _, mark in screen.calls(app)] == ["failed", "", "failed"]
        assert screen.calls(app)[2][:2] == ("nonsense {}", model.given("tool")[2])
        unknown = "There is no such tool. There are: read_file, list, delete."
        assert model.given("tool")[1:] == ["milk", unknown]

        await cleared(pilot)
        servers.running.clear()
        model.calls = [[call("list")]]
        await screen.say(pilot, "Go")
        await until(pilot, lambda: servers.running)
        await pilot.press("escape")
        await answered(pilot, app)
        assert screen.calls(app)[0][2] == "stopped"
        assert servers.running[0].cancelled()
        assert model.given("tool") == [STOPPED]


async def test_rounds_end(model: FakeModel) -> None:
    """Though the model goes on calling."""
    tools, servers = toolbox()
    model.calls = [[call("list")] for _ in range(ROUNDS + 2)]
    async with running(model, toolbox=tools) as (app, pilot):
        await screen.say(pilot, "Go")
        await until(pilot, lambda: len(model.seen) > ROUNDS and screen.idle(app))
        assert len(servers.called) == ROUNDS
        assert screen.notices(app).count(ROUNDS_OVER) == 1
        assert "tool_calls" not in app.state.conversation.turns[-1].info
    assert [seen.options.get("tool_choice") for seen in model.seen] == [None] * ROUNDS + ["none"]


async def test_switches_and_starts(model: FakeModel) -> None:
    tools, servers = toolbox()
    async with running(model, toolbox=tools) as (app, pilot):
        for number, (switch, choice) in enumerate([("off", "none"), ("on", None)]):
            await screen.say(pilot, f"/tools {switch}")
            await until(pilot, lambda s=switch: f"Tools are {s} in" in screen.shown(app))
            await screen.say(pilot, "/tools")
            await until(pilot, lambda n=number: screen.shown(app).count("read_file") > n)
            assert screen.shown(app).count("Tools are off in this conversation, /tools on") == 1
            for options in (app.state.loaded.chat.options, app.state.conversation.options):
                assert options.get("tool_choice") == choice
        # Servers that are not ready are waited for.
        servers.ready = False
        await screen.say(pilot, "One")
        await until(pilot, lambda: screen.phase(app) is Phase.SERVERS)
        await pilot.press("escape")
        await until(pilot, lambda: screen.idle(app))
        assert screen.composer(app).text == "One"
        screen.composer(app).put("")
        assert model.seen == []
        await screen.say(pilot, "Two")
        await until(pilot, lambda: screen.phase(app) is Phase.SERVERS)
        servers.ready = True
        await answered(pilot, app)
        assert len(model.seen[0].tools) == 3
        # A failure after calls keeps them.
        await cleared(pilot)
        model.calls = [[call("list")]]
        model.answer, model.error = [], LocalrtError("out of luck")
        await screen.say(pilot, "Go")
        await until(pilot, lambda: "out of luck" in screen.notices(app))
        assert screen.users(app) == ["Go"]
        assert screen.calls(app) == [("files.list {}", "a\nb", "")]
        assert screen.composer(app).text == ""


async def test_resume_with_calls(model: FakeModel, opening: Opening) -> None:
    tools, _ = toolbox()
    model.calls = [[call("list"), call("list")]]
    async with running(model, toolbox=tools, history=opening) as (app, pilot):
        await screen.say(pilot, "Go")
        await answered(pilot, app)
    again = FakeModel()
    tools, _ = toolbox()
    async with running(again, toolbox=tools, history=opening, resume=True) as (app, pilot):
        assert "▸ files.list {}\n  a\n  b" in screen.shown(app)
        await asked(pilot, "And now?")
        roles = [message["role"] for message in again.seen[0].messages]
        assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]
        assert [m["content"] for m in again.seen[0].messages if m["role"] == "tool"] == ["a\nb"] * 2
        again.takes_tools = False
        await asked(pilot, "And without?")
        assert again.seen[1].messages[:6] == again.seen[0].messages  # calls and results stay
        assert again.seen[1].tools == []
        await asked(pilot, "And again?")
        assert screen.notices(app).count(NO_TOOLS) == 1


async def test_killed_during_call(model: FakeModel, opening: Opening) -> None:
    wanted = [call("list"), call("read_file", path="a")]
    with opening() as history:
        conversation = history.new(model="tiny-model")
        conversation.add("user", "Go")
        conversation.add("assistant", "", info={"tool_calls": [call.to_dict() for call in wanted]})
        info = {"tool_call_id": wanted[0].id, "title": "files.list", "arguments": "{}"}
        conversation.answer(role="tool", info=info)
        with history._database.transaction() as connection:
            connection.execute("UPDATE turn SET writer = '1@1' WHERE state = 'writing'")
    tools, _ = toolbox()
    async with running(model, toolbox=tools, history=opening, resume=True) as (app, pilot):
        assert screen.calls(app) == [("files.list {}", "", "cut off: the app ended here")]
        assert any("Not answered" in line for line in screen.notices(app))
        await asked(pilot, "Go on")
    ended = "The app ended before this call did."
    assert model.given("tool") == [ended, ended]
