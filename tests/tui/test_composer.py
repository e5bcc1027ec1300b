"""Keys of the composer, and when the conversation follows new text."""

from __future__ import annotations

import os

import pytest
from textual.events import MouseScrollUp, Paste

from localrt.tui.chat.view import ConversationView
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeModel
from tests.tui.screen import idle


async def test_writing(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        await pilot.press("enter", "space", "enter")
        assert screen.users(app) == []  # blank text is not sent
        composer.put("")
        app.post_message(Paste("one\ntwo\n"))
        await pilot.pause()
        assert composer.text == "one\ntwo\n"
        assert screen.users(app) == []
        heights = []
        for lines in (1, 4, 8, 30):
            composer.put("\n".join(["x"] * lines))
            await pilot.pause()
            heights.append(composer.content_size.height)
        assert heights == [1, 4, 8, 8]
        for key in ("ctrl+j", "shift+enter", "alt+enter"):
            composer.put("")
            await pilot.press("a", key, "b")
            assert composer.text == "a\nb"
        await pilot.press("enter")
        await until(pilot, lambda: screen.users(app) == ["a\nb"])


@pytest.mark.parametrize(
    "end",
    [
        "\r\n",
        "\r",
        "\x1b[27;5;106~",  # Ctrl+J as tmux writes it with extended keys
        "\x1b[106;5u",
        "\x1b[27;5;109~",  # Ctrl+M
    ],
)
async def test_line_ends_of_a_paste(model: FakeModel, end: str) -> None:
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        app.post_message(Paste(f"one{end}two"))
        await pilot.pause()
        assert composer.text == "one\ntwo"
        composer.put("")
        app.post_message(Paste(end.join(map(str, range(30)))))
        await pilot.pause()
        assert composer.text == "[pasted, 30 lines] "
        await pilot.press("backspace", "tab")
        assert composer.text.split() == [str(number) for number in range(30)]


@pytest.mark.skipif(os.name == "nt", reason="nothing can be suspended there")
@pytest.mark.parametrize("window", [None, "f1", "ctrl+o"])
async def test_control_z_suspends(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, window: str | None
) -> None:
    suspended: list[bool] = []
    monkeypatch.setattr(
        "textual.app.App.action_suspend_process", lambda app: suspended.append(True)
    )
    async with running(model) as (app, pilot):
        await pilot.press(*"word")
        if window is not None:
            await pilot.press(window)
        await pilot.press("ctrl+z")
        assert suspended == [True]
        assert screen.composer(app).text == "word"


async def test_resume_redraws(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bool] = []
    async with running(model) as (app, pilot):
        monkeypatch.setattr(app, "refresh", lambda **how: drawn.append(how["layout"]))
        app.app_resume_signal.publish(app)
        await pilot.pause()
    assert True in drawn


async def test_prompt_history(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        for text in ("first", "second\nline", "second\nline"):
            await screen.say(pilot, text)
        composer = screen.composer(app)
        await pilot.press(*"draft", "up")
        assert composer.text == "second\nline"
        await pilot.press("up")
        assert composer.text == "first"
        await pilot.press("up")
        assert composer.text == "first"
        await pilot.press("down")
        assert composer.text == "second\nline"
        await pilot.press("up", "up")  # up moves inside the text first
        assert composer.text == "first"
        await pilot.press("down", "down")
        assert composer.text == "draft"


# -- following -------------------------------------------------------------------------------------


async def test_follow() -> None:
    model = FakeModel([f"line {n}\n\n" for n in range(200)])
    model.hold()
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Hi")
        view = screen.conversation(app)
        model.allow(50)
        await until(pilot, lambda: "line 49" in screen.answers(app)[0])
        await until(pilot, lambda: view.follows)
        assert view.max_scroll_y > 50

        await pilot.press("pageup")
        await until(pilot, lambda: not view.follows)
        place = view.scroll_y
        assert place < view.max_scroll_y
        model.allow(50)
        await until(pilot, lambda: "line 99" in screen.answers(app)[0])
        assert view.scroll_y == place
        await until(pilot, lambda: screen.hint(app) == "More below: Ctrl+End")

        await pilot.press("ctrl+end")
        model.allow(50)
        await until(pilot, lambda: "line 149" in screen.answers(app)[0])
        await until(pilot, lambda: view.follows and screen.hint(app) == "")
        assert view.vertical_scrollbar.position > view.max_scroll_y - 10


async def test_wheel_and_send(model: FakeModel) -> None:
    model.answer = ["word\n\n"] * 60
    async with running(model) as (app, pilot):
        view = screen.conversation(app)
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: idle(app) and view.max_scroll_y > 20)
        view.post_message(MouseScrollUp(view, 5, 5, 0, -1, 0, False, False, False))
        await until(pilot, lambda: not view.follows)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: view.scroll_y == 0)
        await asked(pilot, "more")
        assert view.follows


async def test_short_conversation(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."])
        screen.composer(app).put("\n" * 7)
        await pilot.pause()
        screen.composer(app).put("")
        await pilot.pause()
        assert screen.conversation(app).scroll_y == 0
        assert screen.conversation(app).render_line(1).text.strip().startswith("tiny-model")


# -- mouse and window ------------------------------------------------------------------------------


async def test_mouse_selection() -> None:
    async with running(FakeModel(["Some **bold** words\n\n雨 rain"])) as (app, pilot):
        await asked(pilot, "Hi")
        # Columns count from the edge of the view, three left of the text; lines from its top.
        await pilot.mouse_down(ConversationView, offset=(8, 5))
        await pilot.hover(ConversationView, offset=(7, 7))
        await pilot.mouse_up(ConversationView, offset=(7, 7))
        await pilot.press("ctrl+c")
        assert app.clipboard == "bold words\n\n雨 ra"
        assert screen.composer(app).has_focus


@pytest.mark.parametrize("width", [4, 2])
async def test_no_columns(model: FakeModel, width: int) -> None:
    """A panel beside it may leave the composer as wide as its border, or less."""
    async with running(model) as (app, pilot):
        composer = screen.composer(app)
        assert composer.placeholder
        composer.styles.width = width
        await until(pilot, lambda: composer.size.width == 0)
        assert composer.render_line(0).text == ""
