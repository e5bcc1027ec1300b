"""Calls of tools on the chat page: shown, allowed or not by the user, run by the server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt import History, Turn
from localrt.mcp.servers import ToolServers
from tests.mcp import server as tools_server
from tests.server.conftest import Running, needs_kernels, serving
from tests.server.scripted import Script, scripted, talker
from tests.server.test_page import answer, browser, ended, expect, playwright, send, visit

pytestmark = [needs_kernels, pytest.mark.timeout(300)]
__all__ = ["browser", "playwright", "talker", "visit"]  # fixtures

LEFT = ["read.file", "fail", "picture", "end"]  # the tiny model's context is short


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    command, args = json.dumps(sys.executable), json.dumps([tools_server.__file__])
    server = f"command = {command}\nargs = {args}\ndeny = {LEFT}"
    (folder / "config.toml").write_text(f"[mcp.servers.tests]\n{server}\n", "utf-8")
    return folder


@pytest.fixture(scope="module")
def script(talker: localrt.Model) -> Iterator[Script]:
    with scripted(talker) as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history") / "history.db"


@pytest.fixture(scope="module")
def talking(talker: localrt.Model, script: Script, settings: Path, file: Path) -> Iterator[Running]:
    with serving(talker, name="tiny", history=file, config_dir=settings) as running:
        yield running


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of all calls that reach a tool's server."""
    found: list[dict[str, Any]] = []
    call = ToolServers.call

    def counted(self: ToolServers, tool: Any, arguments: Any, *, most: int) -> Future[Any]:
        found.append(dict(arguments))
        return call(self, tool, arguments, most=most)

    monkeypatch.setattr(ToolServers, "call", counted)
    return found


def call_of(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def ask(page: Any, script: Script, *calls: str, then: str = "So it is.") -> Any:
    """Have the model make calls; return the first that waits. The answer after them is ``then``."""
    expect(page.locator("#tools-list")).to_contain_text("tests: ready")
    script.say("Let me see. " + "\n".join(calls))
    send(page, "Go")
    question = page.locator("article.asked")
    expect(question.get_by_role("button")).to_have_count(3)
    script.say(then)
    return question


def turns(file: Path) -> list[Turn]:
    with History(file) as history:
        return list(history.open(history.list()[0].id).turns)


def test_allowed_by_keyboard(visit: Any, script: Script, file: Path, made: Any) -> None:
    page = visit()
    question = ask(page, script, call_of("add", a=2, b=3))
    expect(question).to_contain_text("The model wants to run tests.add")
    expect(question.locator("pre")).to_have_text('{\n  "a": 2,\n  "b": 3\n}')
    expect(page.get_by_role("status")).to_contain_text("wants to run tests.add")
    assert made == []
    names = ["Allow once", "Always in this chat", "Deny"]
    for name in names:
        expect(question.get_by_role("button", name=f"{name}: tests.add")).to_be_visible()
    question.locator("pre").focus()
    page.keyboard.press("Tab")
    expect(question.get_by_role("button", name="Allow once")).to_be_focused()
    page.keyboard.press("Enter")
    expect(answer(page).locator(".body")).to_have_text("So it is.")
    ended(page)
    assert made == [{"a": 2, "b": 3}]
    page.get_by_text('tests.add {"a": 2, "b": 3}').click()
    expect(page.locator("details.call > div")).to_have_text("5")
    asked, called, result, last = turns(file)
    (call,) = called.info["tool_calls"]
    assert (called.content, last.content) == ("Let me see.", "So it is.")
    assert [asked.role, result.role, last.role] == ["user", "tool", "assistant"]
    facts = {"tool_call_id": call["id"], "title": "tests.add", "ending": "done"}
    assert result.content == "5"
    assert {name: result.info[name] for name in facts} == facts


def test_denied(visit: Any, script: Script, file: Path, made: Any) -> None:
    page = visit()
    question = ask(page, script, call_of("add", a=2, b=3))
    question.get_by_role("button", name="Deny").click()
    expect(ended(page).locator(".body")).to_have_text("So it is.")
    expect(page.get_by_text('tests.add {"a": 2, "b": 3} (not allowed)')).to_be_visible()
    assert made == []
    assert turns(file)[2].content == "The user did not allow this call."


def test_always_in_this_chat(visit: Any, script: Script, made: Any) -> None:
    page = visit()
    question = ask(page, script, call_of("add", a=1, b=1), call_of("add", a=2, b=2))
    question.get_by_role("button", name="Always in this chat").click()
    expect(ended(page).locator(".body")).to_have_text("So it is.")
    assert made == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
    page.get_by_role("button", name="Options").click()
    page.get_by_text("Tools of your MCP servers").click()
    expect(page.get_by_text("add (allowed in this conversation)")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New chat").click()
    ask(page, script, call_of("add", a=3, b=3))
    page.get_by_role("button", name="Options").click()
    expect(page.get_by_text("add (asks): Add two numbers.")).to_be_visible()
    assert len(made) == 2


@pytest.mark.parametrize("before", [True, False], ids=["new", "begun"])
def test_tools_can_be_switched_off(
    visit: Any, script: Script, file: Path, made: Any, before: bool
) -> None:
    """For a chat, before it begins or later, and on again."""
    page = visit()
    if not before:
        script.say("Hello.")
        send(page, "Hi")
        expect(ended(page).locator(".body")).to_have_text("Hello.")
    expect(page.locator("#tools-list")).to_contain_text("tests: ready")
    switch = page.get_by_role("checkbox", name="Use tools")

    def set_switch(checked: bool) -> None:
        page.get_by_role("button", name="Options").click()
        expect(switch).to_be_checked(checked=not checked)
        switch.focus()
        page.keyboard.press("Space")
        page.keyboard.press("Enter")
        expect(switch).to_be_hidden()

    set_switch(False)
    call = call_of("add", a=2, b=3)
    script.say(call)
    send(page, "Go")
    expect(ended(page).locator(".body")).to_contain_text('"name": "add"')
    *_, last = turns(file)
    assert (last.content, last.info.get("tool_calls"), made) == (call, None, [])
    page.reload()
    set_switch(True)
    ask(page, script, call).get_by_role("button", name="Allow once").click()
    expect(answer(page).locator(".body")).to_have_text("So it is.")
    ended(page)
    assert made == [{"a": 2, "b": 3}]


@pytest.mark.parametrize("allowed", [False, True], ids=["question", "run"])
def test_stop_ends_it(visit: Any, script: Script, file: Path, made: Any, allowed: bool) -> None:
    page = visit()
    question = ask(page, script, call_of("sleep", seconds=600), call_of("add", a=1, b=1))
    if allowed:
        question.get_by_role("button", name="Allow once").click()
        expect(question).to_contain_text("tests.sleep runs")
    page.keyboard.press("Escape")
    expect(page.get_by_text('tests.sleep {"seconds": 600} (stopped)')).to_be_visible()
    expect(page.get_by_text('tests.add {"a": 1, "b": 1} (stopped)')).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert len(made) == allowed
    assert [turn.role for turn in turns(file)] == ["user", "assistant", "tool", "tool"]
    send(page, "And now?")
    expect(ended(page).locator(".body")).to_have_text("So it is.")


def test_question_is_there_after_a_reload(visit: Any, script: Script, made: Any) -> None:
    page = visit()
    ask(page, script, call_of("add", a=2, b=3))
    page.reload()
    question = page.locator("article.asked")
    expect(question.locator("pre")).to_contain_text('"b": 3')
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    assert made == []
    question.get_by_role("button", name="Allow once").click()
    expect(ended(page).locator(".body")).to_have_text("So it is.")
    assert made == [{"a": 2, "b": 3}]


def test_markup_is_shown_as_text(visit: Any, script: Script, made: Any) -> None:
    hostile = "<img src=x onerror=alert(1)>\u202e</pre><script>alert(1)</script>"
    page = visit()
    question = ask(page, script, call_of(hostile), call_of("add", a=hostile, b=1))
    expect(page.get_by_text(f"{hostile} {{}} (failed)")).to_be_visible()
    shown = hostile.replace("\u202e", "\\u202e")  # what turns a line around cannot hide
    expect(question.locator("pre")).to_contain_text(shown)
    assert page.locator("#log :is(script, img)").count() == 0
    question.get_by_role("button", name="Deny").click()
    expect(ended(page).locator(".body")).to_have_text("So it is.")
    assert page.locator("#log :is(script, img)").count() == 0
    assert made == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit: Any, script: Script, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-core")
    page = visit(color_scheme=scheme)
    question = ask(page, script, call_of("add", a="1\n" * 200, b=1), call_of("add", a=1, b=1))
    expect(question.get_by_role("button", name="Deny")).to_be_in_viewport()
    found = [axe.Axe().run(page)]
    page.get_by_role("button", name="Options").click()
    page.get_by_text("Tools of your MCP servers").click()
    found.append(axe.Axe().run(page))
    assert [
        (one["id"], one["nodes"]) for each in found for one in each.response["violations"]
    ] == []


def test_end_of_the_server_leaves_no_question(
    talker: localrt.Model, script: Script, settings: Path, tmp_path: Path, made: Any
) -> None:
    file = tmp_path / "history.db"
    with serving(talker, history=file, config_dir=settings) as running:
        script.say(call_of("add", a=2, b=3))
        _, about, _ = running.request("POST", "/v1/conversations", {})
        path = f"/v1/conversations/{about['id']}"
        running.request("POST", f"{path}/items", {"content": [{"text": "Go"}]})
        _, item, _ = running.request("POST", f"{path}/answers", {"tools": True})
        running.request("GET", f"{path}/answers/{item['id']}")  # ends with the answer
        _, found, _ = running.request("GET", f"{path}/items")
        call = found["data"][-1]
        assert (call["role"], call["state"]) == ("tool", "writing")
    *_, result = turns(file)
    assert (result.state, result.info["ending"], made) == ("done", "stopped", [])
