"""Conversations that are kept: list, resume, rename, delete, branches, crashes, full disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widgets import Input, OptionList, Static

from localrt import History
from localrt.common.errors import StorageError
from localrt.tui.chat.blocks import Styles, UserTurn
from localrt.tui.screens.dialogs import Ask, Confirm, ConversationsScreen
from tests.tui import screen
from tests.tui.conftest import Opening, asked, cleared, running, until
from tests.tui.fakes import FakeModel
from tests.tui.screen import idle


async def listed(pilot: Pilot[None]) -> OptionList:
    await pilot.press("ctrl+o")
    await until(pilot, lambda: isinstance(pilot.app.screen, ConversationsScreen))
    return pilot.app.screen.query_one(OptionList)


def kept(opening: Opening) -> list[tuple[str, str, str]]:
    """Role, text and state of the turns of the conversation used last."""
    with opening() as history:
        found = history.list()
        turns = history.open(found[0].id).turns if found else ()
        return [(turn.role, turn.content, turn.state) for turn in turns]


async def test_resume(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening, system="Be brief.", options={"seed": 3}) as (
        app,
        pilot,
    ):
        await asked(pilot, "Hi")
    assert kept(opening) == [("user", "Hi", "done"), ("assistant", "Hello there.", "done")]

    async with running(model, history=opening, resume=True) as (app, pilot):
        assert screen.users(app) == ["Hi"], "before the model is there"
        await asked(pilot, "again")
        assert model.given() == ["Be brief.", "Hi", "Hello there.", "again"]
        assert model.last_chat.options == {"seed": 3}
        await pilot.press("up", "up")
        assert screen.composer(app).text == "Hi", "earlier messages are in the prompt history"


async def test_laid_out_once(
    model: FakeModel, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drawn before the width is known."""
    async with running(model, history=opening) as (_, pilot):
        await asked(pilot, "Hi")
    widths, lay_out = set[int](), UserTurn.lay_out

    def noted(block: UserTurn, width: int, styles: Styles) -> list[Strip]:
        widths.add(width)
        return lay_out(block, width, styles)

    monkeypatch.setattr(UserTurn, "lay_out", noted)
    async with running(model, history=opening, resume=True) as (app, _):
        assert screen.users(app) == ["Hi"]
        assert len(widths) == 1


async def test_context_of_a_branch(
    model: FakeModel, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what the answer took, also when the branch is shown again, or after a restart."""
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "One two three")
        before = screen.footer(app)
        assert "context 5 of" in before
        model.answer = ["Another", " longer", " answer."]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: idle(app) and "context 6 of" in screen.footer(app))
        await pilot.press("alt+left")
        await until(pilot, lambda: "context 5 of" in screen.footer(app))
    count = model.count
    monkeypatch.setattr(model, "count", lambda messages: 99)
    async with running(model, history=opening, resume=True) as (app, pilot):
        await until(pilot, lambda: "context 5 of" in screen.footer(app))
    with opening() as history:  # as versions did that kept the tokens of the answer alone
        history._database.rows("UPDATE turn SET info = json_remove(info, '$.context')")
    monkeypatch.setattr(model, "count", lambda messages: count(messages) + 50 * (len(messages) - 1))
    async with running(model, history=opening, resume=True) as (app, pilot):
        await until(pilot, lambda: "context 5 of" in screen.footer(app))
        await pilot.press("alt+right")
        await until(pilot, lambda: "context 6 of" in screen.footer(app))


async def test_list_search_open_new(
    model: FakeModel, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrt.tui.screens.dialogs._PAUSE", 60.0)
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "About whales")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: not screen.users(app))
        await asked(pilot, "About bread")
        options = await listed(pilot)
        assert options.option_count == 2
        await pilot.press(*"whale", "enter")  # before the search has begun
        await until(pilot, lambda: screen.users(app) == ["About whales"])
        await until(pilot, lambda: model.chats[1].closed)
        await asked(pilot, "More")
        assert model.given("user") == ["About whales", "More"]


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


async def test_rename_and_delete(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "First")
        await screen.say(pilot, "/rename My talk")
        await screen.say(pilot, "/new")
        await asked(pilot, "Second")
        options = await listed(pilot)
        await pilot.press("down", "f2")
        await until(pilot, lambda: isinstance(pilot.app.screen, Ask))
        assert pilot.app.screen.query_one(Input).value == "My talk"
        await pilot.press("x", "enter")
        await until(pilot, lambda: "x" in str(options.get_option_at_index(1).prompt))
        await pilot.press("ctrl+d")
        await until(pilot, lambda: isinstance(pilot.app.screen, Confirm))
        await pilot.press("n")
        assert options.option_count == 2
        await pilot.press("ctrl+d")
        await until(pilot, lambda: isinstance(pilot.app.screen, Confirm))
        await pilot.press("y")
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
    async with running(model, history=opening, resume=True) as (app, pilot):
        assert screen.users(app) == ["One", "Two"]
        assert screen.marks(app) == ["1/2", "1/2"]


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


async def test_escape_before_first_word(model: FakeModel) -> None:
    model.hold()
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Hi\nthere")
        await pilot.press("escape")
        await until(pilot, lambda: screen.idle(app))
        assert screen.kinds(app) == ["Notice"]
        assert screen.composer(app).selected_text == screen.composer(app).text == "Hi\nthere"
        model.release()
        await pilot.press(*"Ho", "enter")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        assert model.given() == ["Ho"]

        assert screen.marks(app) == [], "what was taken back is no branch"

        # A second answer that is stopped so leaves the first one there.
        model.hold()
        await pilot.press("ctrl+r", "escape")
        await until(pilot, lambda: screen.idle(app))
        assert screen.answers(app) == ["Hello there."]
        assert screen.composer(app).text == ""
        assert screen.marks(app) == []

        # An edited message that is taken back and sent again is a branch beside the first alone.
        await pilot.press("alt+e", "!", "enter", "escape")
        await until(pilot, lambda: screen.idle(app))
        assert screen.composer(app).selected_text == "Ho!"
        model.release()
        await pilot.press("end", "?", "enter")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        assert screen.users(app) == ["Ho!?"]
        assert screen.marks(app) == ["2/2"]


async def test_full_disk(model: FakeModel, opening: Opening) -> None:
    async with running(model, history=opening) as (app, pilot):
        await asked(pilot, "One")
        history = app.state.history
        assert history is not None
        connection = history._database._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")  # as full as a disk gets
        model.answer = ["A long answer. " * 4000]
        await asked(pilot, "Two")
        await asked(pilot, "Three")
        model.answer = ["Short."]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen.answers(app)[-1:] == ["Short."] and idle(app))
        problems = [line for line in screen.notices(app, "error") if "Not saved to disk" in line]
        assert len(problems) == 1
        assert "full" in problems[0]
        assert screen.users(app) == ["One", "Two", "Three"]
        assert model.given("user") == ["One", "Two", "Three"]
        await pilot.press("ctrl+q")
        await pilot.pause()
        assert app.is_running, "leaving would lose it"
        connection.execute("PRAGMA max_page_count = 1000000")
        await asked(pilot, "Four")
        assert any("to disk again" in line for line in screen.notices(app, "error"))
        await pilot.press("alt+left")
        await until(pilot, lambda: screen.answers(app)[-1].startswith("A long answer."))
    with opening() as history:
        conversation = history.open(history.list()[0].id)
        assert [t.content for t in conversation.turns if t.role == "user"] == [
            *("One", "Two", "Three")
        ]
        assert conversation.turns[-1].branches == 2


async def test_no_history(model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    async with running(model, history=lambda: History(tmp_path / "file" / "h.db")) as (app, pilot):
        await asked(pilot, "Hi")
        assert any("not saved" in line for line in screen.notices(app, "error"))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen.marks(app) == ["2/2"] and idle(app))
        await listed(pilot)


async def test_damaged_history(model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "history.db").write_bytes(b"not a database" * 1000)
    async with running(model, history=lambda: History(tmp_path / "history.db")) as (app, pilot):
        await asked(pilot, "Hi")
        assert "is damaged" in screen.notices(app, "error")[0]
        (aside,) = tmp_path.glob("history.db.damaged*")
        await screen.say(pilot, "/delete")
        await until(pilot, lambda: isinstance(pilot.app.screen, Confirm))
        assert aside.name in str(pilot.app.screen.query_one(Static).content)


async def test_leaving_saves_kv_cache(
    model: FakeModel, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked: list[Any] = []

    def park(chat: Any) -> None:
        parked.append(chat)

    monkeypatch.setattr("tests.tui.fakes.FakeChat.park", park, raising=False)
    async with running(model, history=opening) as (_, pilot):
        await asked(pilot, "Hi")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: parked == [model.chats[0]])
        await asked(pilot, "Hi")
    assert parked == model.chats
