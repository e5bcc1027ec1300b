"""Conversations that are kept: listed, resumed, branched, in two windows, after crashes."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

import localrt
from localrt import History, Settings
from localrt.chat import ChatSession
from localrt.common.errors import ContextOverflowError, OptionError, StorageError
from localrt.engine.options import read_options
from localrt.history.presets import Defaults, Preset
from localrt.planning.forecast import PlannedContext
from localrt.tui import ChatApp
from localrt.tui.conversation.state import ChatState
from localrt.tui.screens.dialogs import Ask, Choose, Confirm, ConversationsScreen
from tests.conftest import needs_kernels
from tests.mutations import changed, is_line
from tests.tui import screen
from tests.tui.conftest import SIZE, Opening, asked, cleared, running, until
from tests.tui.fakes import FakeModel
from tests.tui.screen import idle


def ids(history: History) -> list[str]:
    return [each.id for each in history.list()]


async def listed(pilot: Pilot[None]) -> OptionList:
    await pilot.press("ctrl+o")
    await until(pilot, lambda: isinstance(pilot.app.screen, ConversationsScreen))
    options = pilot.app.screen.query_one(OptionList)
    await until(pilot, lambda: options.option_count)
    return options


def kept(opening: Opening) -> list[tuple[str, str, str]]:
    """Role, text and state of the turns of the conversation used last."""
    with opening() as history:
        found = history.list()
        turns = history.open(found[0].id).turns if found else ()
        return [(turn.role, turn.content, turn.state) for turn in turns]


async def test_resume(model: FakeModel, opening: Opening) -> None:
    given: dict[str, Any] = {"system": "Be brief.", "options": {"seed": 3}}
    async with running(model, history=opening, **given) as (app, pilot):
        await asked(pilot, "Hi")
    assert kept(opening) == [("user", "Hi", "done"), ("assistant", "Hello there.", "done")]
    async with running(model, history=opening, resume=True) as (app, pilot):
        assert screen.users(app) == ["Hi"], "before the model is there"
        await asked(pilot, "again")
        assert model.given() == ["Be brief.", "Hi", "Hello there.", "again"]
        assert model.last_chat.options == {"seed": 3}
        await pilot.press("up", "up")
        assert screen.composer(app).text == "Hi", "earlier messages are in the prompt history"


async def test_list_search_open_new(
    model: FakeModel, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrt.tui.screens.dialogs._PAUSE", 60.0)
    parked: list[Any] = []
    monkeypatch.setattr("tests.tui.fakes.FakeChat.park", lambda chat: parked.append(chat))
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "About whales")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not screen.users(app))
        await until(pilot, lambda: parked == [model.chats[0]])  # its KV cache is saved
        await asked(pilot, "About bread")
        options = await listed(pilot)
        assert options.option_count == 2
        await pilot.press(*"whale", "enter")  # before the search has begun
        await until(pilot, lambda: screen.users(app) == ["About whales"])
        await until(pilot, lambda: model.chats[1].closed)
        await asked(pilot, "More")
        assert model.given("user") == ["About whales", "More"]
    assert parked == model.chats


@pytest.mark.parametrize("given", [{}, {"temperature": 0.9}], ids=["plain", "command line"])
async def test_new_keeps_settings(model: FakeModel, given: dict[str, Any]) -> None:
    async with running(model, options=given) as (app, pilot):
        await asked(pilot, "Hi")
        for line in ("/system Be brief.", "/set temperature 0.1", "/new"):
            await screen.say(pilot, line)
        await until(pilot, lambda: not screen.users(app))
        await asked(pilot, "You?")
        assert model.given() == ["Be brief.", "You?"]
        assert model.last_chat.options == {"temperature": 0.1}
        for line in ("/system none", "/set temperature none", "/new"):
            await screen.say(pilot, line)
        await until(pilot, lambda: not screen.users(app))
        await asked(pilot, "And now?")
        assert model.given() == ["And now?"]
        assert model.last_chat.options == {}


async def test_new_keeps_what_is_in_force(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "Hi")
    given: dict[str, Any] = {"resume": True, "options": {"temperature": 0.9}}
    async with running(model, history=opening, **given) as (app, pilot):
        await screen.say(pilot, "/tools off")
        await cleared(pilot)
        assert model.last_chat.options == {"temperature": 0.9, "tool_choice": "none"}
        app.state.defaults = Defaults("Be brief.")  # by F5
        await screen.say(pilot, "/new")
        told = ["System prompt: Be brief.", "New conversation, with your new defaults"]
        await until(pilot, lambda: screen.notices(app) == told)


async def test_rename_and_delete(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "First")
        await screen.say(pilot, "/rename My talk")
        await screen.say(pilot, "/new")
        await until(pilot, lambda: not screen.users(app))
        await asked(pilot, "Second")
        options = await listed(pilot)
        await pilot.press("down", "f2")
        await until(pilot, lambda: isinstance(pilot.app.screen, Ask))
        assert pilot.app.screen.query_one(Input).value == "My talk"
        await pilot.press("x", "enter")
        await until(pilot, lambda: "x" in str(options.get_option_at_index(1).prompt))
        for key in "ny":
            assert options.option_count == 2
            await pilot.press("ctrl+d")
            await until(pilot, lambda: isinstance(pilot.app.screen, Confirm))
            await pilot.press(key)
        await until(pilot, lambda: options.option_count == 1)
        await pilot.press("escape")
        await screen.say(pilot, "/delete")
        await until(pilot, lambda: isinstance(pilot.app.screen, Confirm))
        await pilot.press("y")
        await until(pilot, lambda: not screen.users(app))
    assert kept(opening) == []


# -- branches --------------------------------------------------------------------------------------


async def test_branches(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "One")
        await asked(pilot, "Two")
        model.answer = ["Another."]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen.answers(app) == ["Hello there.", "Another."])
        await until(pilot, lambda: idle(app))
        assert screen.marks(app) == ["2/2"]
        assert model.given() == ["One", "Hello there.", "Two"]
        await pilot.press("alt+left")
        await until(pilot, lambda: screen.answers(app) == ["Hello there.", "Hello there."])
        assert screen.marks(app) == ["1/2"]

        await pilot.press("escape", "alt+up", "alt+up", "alt+up", "alt+up", "alt+e")
        assert screen.composer(app).text == "One"
        assert "Editing" in screen.hint(app)
        await pilot.press("!", "enter")
        await until(pilot, lambda: screen.answers(app) == ["Another."] and idle(app))
        assert screen.users(app) == ["One!"]
        assert screen.marks(app) == ["2/2"]
        assert model.given() == ["One!"]
        await pilot.press("alt+right")  # from the last back to the first
        await until(pilot, lambda: screen.users(app) == ["One", "Two"])
        await until(pilot, lambda: idle(app))
    async with running(model, history=opening, resume=True) as (app, pilot):
        assert screen.users(app) == ["One", "Two"]
        assert screen.marks(app) == ["1/2", "1/2"]


@pytest.mark.parametrize("size", [SIZE, (40, 20)])
async def test_edit_an_answer(model: FakeModel, opening: Opening, size: tuple[int, int]) -> None:
    model.answer = ["<think>Hm.</think>", "\n\n/Yes."]
    async with running(model, history=opening, size=size) as (app, pilot):
        await asked(pilot, "One")
        await pilot.press("alt+up", "alt+e")
        assert screen.composer(app).text == "//Yes."
        assert "Editing: Enter keeps it" in " ".join(screen.hint(app).split())
        await pilot.press(*" I do", "enter")
        await until(pilot, lambda: screen.marks(app) == ["2/2"])
        assert screen.answers(app) == ["<think>Hm.</think>\n\n/Yes. I do"]
        assert len(model.seen) == 1
        await asked(pilot, "Two")
        assert model.given()[1] == screen.answers(app)[0]


@pytest.mark.parametrize("finish", ["length", "cancelled"])
async def test_continue(model: FakeModel, opening: Opening, finish: str) -> None:
    async with running(model, history=opening) as (app, pilot):
        await pilot.press("alt+g")
        assert "Nothing has been said" in screen.hint(app)
        model.finish_reason = cast(Any, finish)
        await asked(pilot, "One")
        assert "Alt+G goes on" in screen.hint(app)
        (mark,) = screen.marks(app)
        model.answer, model.error = [], StorageError("no memory")
        await pilot.press("alt+g")
        await until(pilot, lambda: bool(screen.notices(app, "error")) and idle(app))
        assert (screen.answers(app), screen.marks(app)) == (["Hello there."], [mark])
        model.answer, model.error, model.finish_reason = [" And", " more."], None, "stop"
        async with running(FakeModel(), history=opening, resume=True) as (other, right):
            model.hold()
            await pilot.press("alt+g")
            model.allow(1)
            await until(pilot, lambda: screen.answers(app) == ["Hello there. And"])
            model.release()
            await until(pilot, lambda: screen.answers(app) == ["Hello there. And more."])
            await until(pilot, lambda: idle(app))
            await until(right, lambda: screen.answers(other) == screen.answers(app))
            assert screen.marks(app) == screen.marks(other) == []
        assert model.given() == ["One", "Hello there."]
        await screen.say(pilot, "/continue")
        said = lambda: [*screen.notices(app, "error"), screen.hint(app)]  # noqa: E731
        await until(pilot, lambda: "is finished" in str(said()) and idle(app))
    assert kept(opening)[1:] == [("assistant", "Hello there. And more.", "done")]


async def test_remove_fork_pin(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening, size=(40, 20)) as (app, pilot):
        for text in ("One", "Two", "Three"):
            await asked(pilot, text)
        await pilot.press("alt+up", "alt+up", "alt+up", "enter")
        await until(pilot, lambda: isinstance(app.screen, Choose))
        await pilot.press("end", "enter")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        assert "the 2 after it" in str(app.screen.query_one(Static).content)
        await pilot.press("/")  # a text, which is no answer
        assert not isinstance(app.screen, Confirm)
        await pilot.press("escape", "alt+up", "alt+up", "alt+up", "enter")
        await until(pilot, lambda: isinstance(app.screen, Choose))
        await pilot.press("end", "enter")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("enter", "y")
        await until(pilot, lambda: screen.users(app) == ["One", "Two"])
        assert len(screen.answers(app)) == 1
        assert model.last_chat.closed
        await pilot.press("alt+up", "alt+up")
        await screen.say(pilot, "/fork")
        await until(pilot, lambda: screen.users(app) == ["One"])
        assert "This is a copy" in screen.notices(app)[-1]
        await screen.say(pilot, "/rename Copy")
        options = await listed(pilot)
        assert [str(row.prompt).split("\n")[0] for row in options.options] == ["● Copy", "  One"]
        await pilot.press("down", "ctrl+t")
        await until(pilot, lambda: str(options.options[0].prompt).startswith("  * One"))
        await pilot.press("escape")
        await screen.say(pilot, "/pin")
        await until(pilot, lambda: "Pinned" in screen.notices(app)[-1])
        with opening() as history:
            assert [each.pinned for each in history.list()] == [True, True]


async def test_slow_history_takes_keys(
    model: FakeModel, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the history is searched or read, keys are taken, and what was asked for last counts."""
    begun, go_on = list[str](), threading.Event()

    def slow(work: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda text: (begun.append(text), go_on.wait(60), work(text))[2]

    async with running(model, history=opening) as (app, pilot):
        for text in ("An apple", "A pear", "A plum"):
            await asked(pilot, text)
            await cleared(pilot)
        options = await listed(pilot)
        monkeypatch.setattr(app.state, "list", slow(app.state.list))
        monkeypatch.setattr(app.state, "open", slow(app.state.open))
        line = app.screen.query_one(Input)
        await pilot.press("p")
        await until(pilot, lambda: begun[-1:] == ["p"])
        await pilot.press(*"ear")
        await until(pilot, lambda: begun[-1] == "pear")
        assert line.value == "pear"
        assert options.option_count == 3
        await pilot.press("enter")
        assert isinstance(app.screen, ConversationsScreen), "it is not known yet what is first"
        go_on.set()
        await until(pilot, lambda: not isinstance(app.screen, ConversationsScreen))
        await until(pilot, lambda: screen.users(app) == ["A pear"])
        options = await listed(pilot)
        await until(pilot, lambda: options.option_count == 3)
        row = next(n for n, each in enumerate(options.options) if "A plum" in str(each.prompt))
        await pilot.press(*["down"] * row)
        monkeypatch.setattr(app.state, "list", lambda text: [])
        go_on.clear()
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(app.screen, ConversationsScreen))
        await pilot.press(*"hello")
        await until(pilot, lambda: screen.composer(app).text == "hello")
        assert screen.users(app) == ["A pear"]
        go_on.set()
        await until(pilot, lambda: screen.users(app) == ["A plum"])
    with opening() as history:
        assert [each.draft for each in map(history.open, ids(history)) if each.draft] == ["hello"]


async def test_temporary(model: FakeModel, opening: Opening, tmp_path: Path) -> None:
    async with running(model, history=opening, system="Be brief.") as (app, pilot):
        assert "System prompt: Be brief." in screen.notices(app)
        assert "temporary" not in screen.footer(app)
        await pilot.press("alt+n")
        await until(pilot, lambda: "temporary" in screen.footer(app))
        await asked(pilot, "secret words")
        await pilot.press("ctrl+s", *"secret draft")
        assert "never on the disk" in screen.hint(app)
        await pilot.press("ctrl+n")
        await until(pilot, lambda: "temporary" not in screen.footer(app))
        assert screen.composer(app).text == ""
    for path in tmp_path.glob("history.db*"):
        assert b"secret" not in path.read_bytes()


async def test_drafts(model: FakeModel, opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.tui.chat.screen._OTHERS_SECONDS", 0.01)
    async with running(model, history=opening) as (app, pilot):
        await pilot.press(*"first")
        await until(pilot, lambda: app.chat._kept == "first")
        async with running(FakeModel(), history=opening) as (other, _):
            assert screen.composer(other).text == "", "it is the first window's"
        await pilot.press("enter")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        assert app.state.conversation.take_draft() == ""
        await pilot.press(*"second", "ctrl+n")
        await until(pilot, lambda: not screen.users(app))
        assert screen.composer(app).text == ""
        await pilot.press(*"third", "ctrl+q")
    for room in ("history", "conversation"):
        monkeypatch.setattr(f"localrt.history.{room}.is_alive", lambda name: False)
    async with running(model, history=opening) as (app, pilot):
        assert screen.composer(app).text == "third"
        await listed(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: screen.users(app) == ["first"])
        assert screen.composer(app).text == "second\n\nthird"
    async with running(model, history=opening) as (app, pilot):
        assert screen.composer(app).text == ""


@pytest.mark.parametrize("size", [SIZE, (40, 20)])
async def test_full_context(
    model: FakeModel, opening: Opening, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = SimpleNamespace(contexts=[PlannedContext(4096, 1.0, True, nbytes=4_096_000)])
    monkeypatch.setattr(localrt, "plan", lambda path: longer)
    model.info = replace(model.info, ctx=64)
    loads: list[dict[str, Any]] = []

    def load(name: str, progress: Any, **options: Any) -> FakeModel:
        loads.append(options)
        return FakeModel()

    async with running(model, history=opening, size=size, load_by_name=load) as (app, pilot):

        async def choose(*keys: str) -> None:
            await until(pilot, lambda: isinstance(app.screen, Choose))
            await pilot.press(*keys, "enter")
            await until(pilot, lambda: not isinstance(app.screen, Choose))

        model.answer, model.finish_reason = ["word "] * 63, "length"
        await screen.say(pilot, "One")
        await choose()
        assert screen.marks(app) == ["cut off: the context is full"]
        assert model.last_chat.options == {"overflow": "drop_oldest"}
        model.answer, model.error = [], ContextOverflowError("too long")
        await screen.say(pilot, "Two")
        await until(pilot, lambda: isinstance(app.screen, Choose))
        model.error = StorageError("no memory")
        await choose("down")
        await until(pilot, lambda: len(model.seen) == 3 and idle(app))
        assert screen.answers(app) == [], "the summary failed"
        await pilot.press("alt+left")
        await until(pilot, lambda: screen.users(app) == ["One"])
        assert screen.composer(app).text == "Two"
        screen.composer(app).put("")
        model.answer, model.error, model.finish_reason = ["We counted."], None, "stop"
        await screen.say(pilot, "/full")
        await choose("down")
        await until(pilot, lambda: screen.answers(app) == ["We counted."] and idle(app))
        await screen.say(pilot, "Two")
        await until(pilot, lambda: len(model.seen) == 5 and idle(app))
        assert model.given("assistant", "user")[1:] == ["We counted.", "Two"]
        await screen.say(pilot, "/full")
        await choose("down", "down")
        await until(pilot, lambda: loads == [{"ctx": 256}] and idle(app))


async def test_left_or_refused(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening) as (app, pilot):
        # Escape leaves editing.
        await asked(pilot, "One")
        await pilot.press("alt+e", "x", "escape")
        assert screen.composer(app).text == ""
        await asked(pilot, "Two")
        assert screen.users(app) == ["One", "Two"]
        assert screen.marks(app) == []

        # A refused message does not stay in the way.
        await cleared(pilot)
        await asked(pilot, "One")
        model.answer, model.error = [], StorageError("too long")
        await screen.say(pilot, "a novel")
        await until(pilot, lambda: screen.composer(app).text == "a novel")
        assert screen.users(app) == ["One"]
        model.answer, model.error = ["Yes."], None
        screen.composer(app).put("")
        await asked(pilot, "Two")
        assert model.given() == ["One", "Hello there.", "Two"]

        # A refused retry shows the old answer.
        await cleared(pilot)
        model.answer = ["Hello there."]
        await asked(pilot, "One")
        model.answer, model.error = [], StorageError("no memory")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: bool(screen.notices(app, "error")) and idle(app))
        assert screen.users(app) == ["One"]
        assert screen.answers(app) == ["Hello there."]


async def test_escape_before_first_word(model: FakeModel) -> None:
    model.hold()
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Hi\nthere")
        await pilot.press("escape")
        await until(pilot, lambda: idle(app))
        assert screen.kinds(app) == ["Notice"]
        assert screen.composer(app).selected_text == screen.composer(app).text == "Hi\nthere"
        model.release()
        await pilot.press(*"Ho", "enter")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        assert model.given() == ["Ho"]
        assert screen.marks(app) == [], "what was taken back is no branch"

        # An edited message that is taken back and sent again is a branch beside the first alone.
        model.hold()
        await pilot.press("alt+e", "!", "enter", "escape")
        await until(pilot, lambda: idle(app))
        assert screen.composer(app).selected_text == "Ho!"
        model.release()
        await pilot.press("end", "?", "enter")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        assert screen.users(app) == ["Ho!?"]
        assert screen.marks(app) == ["2/2"]


# -- when things go wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", ["", "Hello"])
async def test_stopped_answer(model: FakeModel, opening: Opening, pieces: str) -> None:
    """By leaving the app, after the first piece or before it."""
    model.hold()
    async with running(model, history=opening) as (app, pilot):
        await screen.say(pilot, "Hi")
        if pieces:
            model.allow(1)
        await until(pilot, lambda: screen.answers(app) == [pieces])
        await pilot.press("ctrl+q")
    assert kept(opening) == [("user", "Hi", "done"), ("assistant", pieces, "cancelled")]
    model.release()
    async with running(model, history=opening, resume=True) as (app, pilot):
        assert screen.marks(app) == ["stopped"]
        await asked(pilot, "Again")
    assert model.given() == ["Hi", pieces or "(No answer.)", "Again"]


async def test_full_disk(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "One")
        history = app.state.history
        assert history is not None
        connection = history._database._connections[0]
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")  # as full as a disk gets
        model.answer = ["A long answer. " * 4000]
        await asked(pilot, "Two")
        await asked(pilot, "Three")
        model.answer = ["Short."]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen.answers(app)[-1:] == ["Short."] and idle(app))
        told = lambda: [n for n in screen.notices(app, "error") if "not on disk yet" in n]  # noqa: E731
        await until(pilot, told)
        assert len(told()) == 1
        assert "full" in told()[0]
        assert screen.users(app) == ["One", "Two", "Three"]
        assert model.given("user") == ["One", "Two", "Three"]
        await pilot.press("ctrl+q")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press("escape")
        connection.execute("PRAGMA max_page_count = 1000000")
        await asked(pilot, "Four")
        await until(pilot, lambda: screen.notices(app)[-1:] == ["All is saved to disk again"])
        await pilot.press("alt+left")
        await until(pilot, lambda: screen.answers(app)[-1].startswith("A long answer."))
    with opening() as history:
        turns = history.open(history.list()[0].id).turns
        assert [t.content for t in turns if t.role == "user"] == ["One", "Two", "Three"]
        assert turns[-1].branches == 2


async def test_no_room_at_the_start(model: FakeModel, tmp_path: Path) -> None:
    """The app opens, says what is not saved, asks at the end, and tries again."""
    (tmp_path / "data").write_text("not a folder yet")
    path = tmp_path / "data" / "h.db"
    opening = partial(History, path, patient=True)
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "Hi")
        await until(pilot, lambda: "not on disk yet" in "".join(screen.notices(app, "error")))
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not screen.users(app))
        await pilot.press("ctrl+q")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press(*str(tmp_path / "data"), "enter")
        await until(pilot, lambda: "cannot" in str(app.screen.query_one("#problem").render()))
        await pilot.press(*"x", "enter")
        await until(pilot, lambda: not app.is_running)
    (written,) = (tmp_path / "datax").iterdir()
    with History(tmp_path / "later.db") as history:
        (talk,) = history.load_file(written).conversations
        assert [turn.content for turn in talk.turns] == ["Hi", "Hello there."]


async def test_deleted_elsewhere(model: FakeModel, opening: Opening) -> None:
    """What cannot be done is told, and what was written comes back."""
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "Hi")
        with opening() as other:
            other.delete(app.state.conversation.id)
        await pilot.press("ctrl+r")
        told = "this conversation was deleted"
        await until(pilot, lambda: told in "".join(screen.notices(app, "error")))
        await screen.say(pilot, "More words")
        await until(pilot, lambda: screen.composer(app).text == "More words")
        assert screen.answers(app) == ["Hello there."]
        assert app.is_running


def test_ended_by_a_signal(tmp_path: Path) -> None:
    """What waits is written to a folder, and that is told; unless it was given up."""
    (tmp_path / "data").write_text("not a folder")
    opening = partial(History, tmp_path / "data" / "h.db", patient=True)
    for asked_before in (False, True):
        state = ChatState(opening, model="m", system=None, options={})
        state.conversation.add("user", "Hi", after=0)
        line = state.close(asked=asked_before)
        assert bool(line) is not asked_before
        if line:
            written = Path(line.partition("Written to ")[2].partition(";")[0])
            assert "Hi" in written.read_text(encoding="utf-8")
            shutil.rmtree(written.parent)


async def test_no_history(model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    async with running(model, history=lambda: History(tmp_path / "file" / "h.db")) as (app, pilot):
        await asked(pilot, "Hi")
        assert any("not saved" in line for line in screen.notices(app, "error"))
        await listed(pilot)
    (tmp_path / "history.db").write_bytes(b"not a database" * 1000)
    async with running(model, history=lambda: History(tmp_path / "history.db")) as (app, pilot):
        await asked(pilot, "Hi")
        assert "is damaged" in screen.notices(app, "error")[0]
        (aside,) = tmp_path.glob("history.db.damaged*")
        await screen.say(pilot, "/delete")
        await until(pilot, lambda: isinstance(pilot.app.screen, Confirm))
        assert aside.name in str(pilot.app.screen.query_one(Static).content)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Data, cache and config folders that are not there yet, under a umask that hides nothing."""
    monkeypatch.delenv("LOCALRT_CACHE", raising=False)
    monkeypatch.setenv("LOCALRT_KV_DISK", "1GB")
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    before = os.umask(0)
    yield Settings.from_environment()
    os.umask(before)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX's")
@needs_kernels
async def test_nobody_else_may_read(tiny_folder: Path, folders: Settings, tmp_path: Path) -> None:
    """What the app writes while it is used, whatever the umask."""
    app = ChatApp(
        lambda progress: localrt.load(tiny_folder, ctx=512),
        model_name="tiny",
        system="Be brief.",
        options={"max_tokens": 4},
        history=History,
        config=folders.config_dir,
    )
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await pilot.press("alt+n")
        await asked(pilot, "a temporary secret " * 20)
        await cleared(pilot)
        await until(pilot, lambda: not app.chat._parking)
        assert not list(tmp_path.rglob("blocks.bin"))
        await asked(pilot, "a secret " * 20)
        await screen.say(pilot, f"/export {tmp_path / 'chat.md'}")
        await until(pilot, lambda: (tmp_path / "chat.md").exists())
        app.preferences.change({"system": "a secret"})
        app.state.presets.save(Preset("mine", "a secret"))
        await cleared(pilot)  # parks the conversation
        await asked(pilot, "another secret")
        found = list(tmp_path.rglob("*"))  # SQLite's own files too
        assert not [path for path in found if path.stat().st_mode & 0o077]
    names = {path.name for path in tmp_path.rglob("*")}
    assert {"history.db", "tokens.json", "blocks.bin", "config.toml", "presets.toml"} <= names


async def test_running_answer_elsewhere(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another window on the same conversation."""
    monkeypatch.setattr("localrt.tui.chat.screen._OTHERS_SECONDS", 0.01)
    one, two = FakeModel(["One."]), FakeModel(["Two is long. ", "It ends."])
    async with running(one, history=opening) as (first, left):
        await asked(left, "First")
        async with running(two, history=opening, resume=True) as (second, right):
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

            # A message that is taken back there leaves both where they were.
            two.hold()
            await screen.say(right, "Fourth")
            await until(left, lambda: screen.users(first)[-1] == "Fourth")
            await right.press("escape")
            await until(left, lambda: screen.users(first)[-1] == "Third")
            await asked(left, "Fifth")
            assert one.given()[-3:] == ["Third", "One.", "Fifth"]
            assert screen.marks(first) == []
            assert not first.state.history.unsaved
            two.release()


# -- chats that others saved -----------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
SAVED: dict[str, Any] = {
    "version": 1,
    "model": "m",
    "options": {"temperature": 0.5},
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Add"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
}


class _Model(FakeModel):
    check = staticmethod(read_options)

    def open_chat(self) -> Any:
        return SimpleNamespace(tokens=0, cancel=lambda: None, close=lambda: None)

    def load_chat(self, path: str | Path) -> Any:
        return ChatSession.load(cast(Any, self), path)


def loaded(path: Path) -> list[Any]:
    """The messages of a saved chat, once the app has opened it."""
    state = ChatState(None, model="m", system=None, options={})
    state._model = cast(Any, _Model())
    state.load(path)
    try:
        return state.conversation.messages()
    finally:
        state.history.close()


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ((), None, ""),
        (("messages", 1, "content"), [3], "is not a saved chat: "),
        (("messages", 2, "tool_calls", 0), 3, "is not a saved chat: "),
        (("options",), {"host": 1}, "host"),
        (("options",), {"temperature": "hot"}, "temperature"),
    ],
)
def test_a_saved_chat(tmp_path: Path, place: Any, value: Any, told: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(changed(SAVED, [(place, value)]) if place else SAVED))
    if not told:
        roles = [each["role"] for each in loaded(path)]
        assert roles == ["system", "user", "assistant", "tool"]
        path.write_text("[" * 100_000)
        told = "is not JSON"
    wrong = OptionError if "options" in place else StorageError
    with pytest.raises(wrong, match=told) as caught:
        loaded(path)
    assert is_line(str(caught.value))
