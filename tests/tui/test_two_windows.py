"""Two windows on one conversation: each shows what is written, and sends what it shows."""

from __future__ import annotations

import gc
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from localrt import Conversation
from localrt.common.errors import StorageError
from localrt.tui import ChatApp
from tests.tui import screen
from tests.tui.conftest import SIZE, Opening, app_for, asked, plain_chat, running, until
from tests.tui.fakes import FakeLoader, FakeModel, call
from tests.tui.screen import idle

Pair = tuple[ChatApp, Pilot[None], ChatApp, Pilot[None]]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.tui.chat.screen._OTHERS_SECONDS", 0.01)
    monkeypatch.setattr("localrt.tui.plain._OTHERS_SECONDS", 0.01)


@asynccontextmanager
async def two_windows(one: FakeModel, two: FakeModel, opening: Opening) -> AsyncIterator[Pair]:
    """Both show a conversation that begins with “First”, answered by ``one``."""
    first = app_for(FakeLoader(one), history=opening)
    async with first.run_test(size=SIZE) as left:
        await asked(left, "First")
        second = app_for(FakeLoader(two), history=opening, resume=True)
        async with second.run_test(size=SIZE) as right:
            await until(right, lambda: idle(second))
            yield first, left, second, right


async def test_running_answer_elsewhere(opening: Opening) -> None:
    one, two = FakeModel(["One."]), FakeModel(["Two is long. ", "It ends."])
    async with two_windows(one, two, opening) as (first, left, second, right):
        two.hold()
        await screen.say(right, "Second")
        await until(left, lambda: screen.users(first) == ["First", "Second"])
        assert screen.marks(first) == ["being written by another window"]
        await screen.say(left, "Third")
        assert screen.waiting(first) == ["Third"]
        assert "for the answer in another window" in screen.hint(first)
        two.allow(1)
        await until(left, lambda: screen.answers(first)[-1] == "Two is long. ")
        assert screen.users(first) == ["First", "Second", "Third"], "it waits below"
        assert len(one.seen) == 1
        two.release()
        await until(left, lambda: len(one.seen) == 2 and idle(first))
        assert one.given() == ["First", "One.", "Second", "Two is long. It ends.", "Third"]
        assert screen.marks(first) == []
        await until(right, lambda: screen.answers(second)[-1] == "One.")
        assert screen.kinds(first)[-4:] == ["UserTurn", "AnswerBlock"] * 2


async def test_overtaken_counts(opening: Opening) -> None:
    """Of tokens: the first ones end before they have begun, and leave nothing behind."""
    app = app_for(FakeLoader(FakeModel(["One."])), history=opening)
    async with app.run_test(size=SIZE) as pilot:
        await asked(pilot, "First")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen.marks(app) == ["2/2"] and idle(app))
        for _ in range(3):
            app.chat.action_branch()
        gc.collect()
        await until(pilot, lambda: idle(app))


async def test_take_back(opening: Opening) -> None:
    one, two = FakeModel(["One."]), FakeModel(["Two."])
    async with two_windows(one, two, opening) as (first, left, _, right):
        two.hold()
        await screen.say(right, "Second")
        await until(left, lambda: len(screen.users(first)) == 2)
        await screen.say(left, "Third")
        await left.press("escape")
        assert screen.composer(first).text == "Third"
        two.release()
        await until(left, lambda: screen.answers(first) == ["One.", "Two."])
        assert len(one.seen) == 1


async def test_branch_elsewhere(opening: Opening) -> None:
    one, two = FakeModel(["One."]), FakeModel(["Two."])
    async with two_windows(one, two, opening) as (first, left, second, right):
        one.hold()
        await screen.say(left, "Mine")
        await until(right, lambda: screen.users(second) == ["First", "Mine"])
        await right.press("alt+e")
        screen.composer(second).put("Theirs")
        await right.press("enter")
        await until(right, lambda: screen.users(second) == ["First", "Theirs"] and idle(second))
        assert two.given() == ["First", "One.", "Theirs"], "a branch waits for nobody"
        one.release()
        await until(left, lambda: idle(first) and "1/2" in screen.marks(first))
        assert screen.users(first) == ["First", "Mine"]
        await asked(left, "More")
        assert one.given() == ["First", "One.", "Mine", "One.", "More"]
        await left.press("alt+right")
        await until(left, lambda: screen.users(first) == ["First", "Theirs"])


async def test_refused_message(opening: Opening) -> None:
    one, two = FakeModel(["One."]), FakeModel(["Two."])
    async with two_windows(one, two, opening) as (first, left, _, right):
        one.answer, one.error = [], StorageError("too long")
        await screen.say(left, "a novel")
        await until(left, lambda: screen.composer(first).text == "a novel")
        await screen.say(right, "Second")
        await until(left, lambda: screen.answers(first) == ["One.", "Two."])
        assert screen.users(first) == ["First", "Second"]


def test_plain_chat(opening: Opening, tmp_path: Path) -> None:
    model = FakeModel(["Yes."])
    with opening() as other:

        def load(progress: Any) -> FakeModel:
            conversation = other.open(other.list()[0].id)
            load_later.append(conversation)
            return model

        load_later: list[Conversation] = []
        begun = other.new(model="m")
        begun.add("user", "First")
        begun.add("assistant", "One.")

        class Lines(io.StringIO):
            def readline(self, *size: Any) -> str:
                line = super().readline(*size)
                if line:
                    load_later[0].add("user", "Second")
                    load_later[0].add("assistant", "Two.")
                return line

        printed = plain_chat(load, tmp_path, ["Third"], resume=True, source=Lines)
    assert "Written in another window:\nYou: Second\nModel: Two.\n" in printed
    assert model.given() == ["First", "One.", "Second", "Two.", "Third"]


async def test_calls_elsewhere(opening: Opening) -> None:
    wanted = [call("list")]
    with opening() as history:
        theirs = history.new(model="m")
        theirs.add("user", "Go")
        async with running(FakeModel(), history=opening, resume=True) as (app, pilot):
            theirs.add("assistant", "", info={"tool_calls": [call.to_dict() for call in wanted]})
            info = {"tool_call_id": wanted[0].id, "title": "files.list", "arguments": "{}"}
            writer = theirs.answer(role="tool", info=info)
            await until(pilot, lambda: len(screen.calls(app)) == 1)
            assert screen.calls(app)[0][2] == "being written by another window"
            writer.write("a.txt")
            writer.finish("done", info={**info, "ending": "ok"})
            await until(pilot, lambda: screen.calls(app) == [("files.list {}", "a.txt", "")])


async def test_message_taken_back_elsewhere(opening: Opening) -> None:
    """The other window, which showed it, goes on where both were."""
    one, two = FakeModel(["One."]), FakeModel(["Two."])
    async with two_windows(one, two, opening) as (first, left, _, right):
        two.hold()
        await screen.say(right, "Second")
        await until(left, lambda: screen.users(first) == ["First", "Second"])
        await right.press("escape")
        await until(left, lambda: screen.users(first) == ["First"])
        await asked(left, "Third")
        assert one.given() == ["First", "One.", "Third"]
        assert screen.marks(first) == []
        assert not first.state.conversation.unsaved
        two.release()
