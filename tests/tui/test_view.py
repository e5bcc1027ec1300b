"""The conversation on screen: what is followed, copied, found; pictures of it.

`pytest tests/tui/test_view.py --snapshot-update` draws the pictures again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.style import Style
from textual.events import MouseScrollUp
from textual.geometry import Offset
from textual.pilot import Pilot
from textual.selection import Selection
from textual.strip import Strip
from textual.widgets import Input, Static

from localrt.tui import ChatApp
from localrt.tui.chat.bars import FindBar
from localrt.tui.chat.blocks import GUTTER, AnswerBlock, UserTurn
from localrt.tui.chat.markdown import lines_of
from localrt.tui.chat.panel import LivePanel
from localrt.tui.chat.view import ConversationView
from localrt.tui.screens.dialogs import Choose, TooSmall
from tests.tui import screen
from tests.tui.conftest import app_for, asked, running, until
from tests.tui.fakes import STREAMED, VIEW, FakeLoader, FakeModel, WatchedModel
from tests.tui.screen import idle
from tests.tui.test_drawing import DOCUMENT


async def test_thinking() -> None:
    model = FakeModel(["<think>", "Hmm.", " Aha.", "</think>", "\n\nYes."])
    model.hold()
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Hi")
        model.allow(3)
        await until(pilot, lambda: "Hmm. Aha." in screen.shown(app))
        assert "▾ Thinking ..." in screen.shown(app)
        model.allow(9)
        await until(pilot, lambda: idle(app))
        assert re.search(r"▸ Thought for \d+(\.\d)? m?s", screen.shown(app))
        assert "Hmm." not in screen.shown(app)
        assert "Yes." in screen.shown(app)
        await pilot.press("ctrl+t")
        assert "Hmm." in screen.shown(app)
        await pilot.press("alt+c")
        await until(pilot, lambda: app.clipboard == "Yes.")


# -- marking and copying ---------------------------------------------------------------------------

CODE = "Do:\n\n```python\na = 1\n```\n\nor\n\n- so:\n\n  ```sh\n  ls\n  ```\n"


async def test_copying(model: FakeModel) -> None:
    model.answer = [CODE]
    async with running(model) as (app, pilot):
        await pilot.press("alt+c")
        assert "nothing to copy" in screen.hint(app)
        await asked(pilot, "Hi")
        for keys, copied in (
            (["alt+c"], CODE),
            (["alt+y"], "ls\n"),
            (["alt+y"], "a = 1\n"),
            (["alt+up", "alt+up", "alt+c"], "Hi"),
        ):
            await pilot.press(*keys)
            await until(pilot, lambda copied=copied: app.clipboard == copied)
            if copied == "ls\n":
                await until(pilot, lambda: "code block 2 of 2: sh" in screen.hint(app))


async def test_mouse() -> None:
    async with running(FakeModel(["Some **bold** words\n\n雨 rain"])) as (app, pilot):
        await asked(pilot, "Hi")
        # Columns count from the edge of the view, three left of the text; lines from its top.
        await pilot.mouse_down(ConversationView, offset=(8, 5))
        await pilot.hover(ConversationView, offset=(7, 7))
        await pilot.mouse_up(ConversationView, offset=(7, 7))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: bool(app.clipboard))
        assert app.clipboard == "bold words\n\n雨 ra"
        assert screen.composer(app).has_focus
        # A click marks a turn, and Enter opens its menu.
        await pilot.click(ConversationView, offset=(6, 5))
        assert isinstance(screen.conversation(app).marked, AnswerBlock)
        assert screen.composer(app).has_focus
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Choose))
        await pilot.press("down", "enter")
        await until(pilot, lambda: screen.marks(app) == ["2/2"] and idle(app))


# -- scrolling -------------------------------------------------------------------------------------


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
        # The wheel, too, lets go of the end; a message that is sent takes it up again.
        model.release()
        await until(pilot, lambda: idle(app))
        view.post_message(MouseScrollUp(view, 5, 5, 0, -1, 0, False, False, False))
        await until(pilot, lambda: not view.follows)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: view.scroll_y == 0)
        await asked(pilot, "more")
        assert view.follows


async def test_resize_keeps_place(model: FakeModel) -> None:
    text = "\n\n".join(
        f"In chapter {n}, " + " ".join(f"word{n}.{k}" for k in range(90)) for n in range(12)
    )
    async with running(model) as (app, pilot):
        view = screen.conversation(app)
        view.add(UserTurn("Write a novel"), AnswerBlock(text), UserTurn("Thanks"))
        await until(pilot, lambda: round(view.scroll_y) == view.max_scroll_y > 40)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: view.scroll_y == 0)
        await pilot.press(*["pagedown"] * 3)
        await until(pilot, lambda: view.scroll_y > 40 and not view.follows)
        top = screen.shown(app).splitlines()[0]
        word = top.split()[0]
        for width, height in ((110, 24), (40, 30), (60, 12), (80, 24)):
            await pilot.resize_terminal(width, height)
            await until(pilot, lambda width=width: view.size.width == width)
            assert word in screen.shown(app).splitlines()[0]
            assert not view.follows
        assert screen.shown(app).splitlines()[0] == top
        await pilot.press("f3")  # a panel that makes it narrower, or lower
        await until(pilot, lambda: app.chat.panel.is_open)
        assert word in screen.shown(app).splitlines()[0]


# -- answers of any size ---------------------------------------------------------------------------


def numbered(count: int) -> str:
    """An answer of ``count`` paragraphs, some of which take several lines."""
    return "\n\n".join(f"Part {n} " + f"word{n} " * (n % 40) for n in range(count))


def numbers(app: ChatApp) -> list[int]:
    """The numbers of the paragraphs on the screen."""
    return [int(number) for number in re.findall(r"Part (\d+)", screen.shown(app))]


async def test_huge_answer(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is on the screen is laid out, and everything is where it belongs."""
    drawn = list[str]()
    monkeypatch.setattr(
        "localrt.tui.chat.blocks.lines_of",
        lambda part, *how: (drawn.append(part.text), lines_of(part, *how))[1],
    )

    def laid_out() -> int:
        """Characters that were laid out since the last call."""
        size = sum(map(len, drawn))
        drawn.clear()
        return size

    count, most = 5000, 12_000  # characters: a few screens
    text = numbered(count)
    assert len(text) > 50 * most
    async with running(model) as (app, pilot):
        view = screen.conversation(app)
        view.add(UserTurn("Write a lot"), AnswerBlock(text), UserTurn("Thanks"))
        await until(pilot, lambda: "Thanks" in screen.shown(app))
        assert numbers(app)[-1] == count - 1
        assert laid_out() < most
        for share in (0.0, 0.5, 0.25, 0.99, 0.75):
            view.scroll_to(y=share * view.max_scroll_y, animate=False, force=True)
            await pilot.pause()
            found = numbers(app)
            assert found == list(range(found[0], found[0] + len(found))) != []
            assert abs(found[0] / count - share) < 0.1
            assert laid_out() < most
        for width in (50, 110, 80):
            top = screen.shown(app).splitlines()[0]
            await pilot.resize_terminal(width, 24)
            await until(pilot, lambda width=width: view.size.width == width)
            assert numbers(app)[0] in (found[0] - 1, found[0])
            assert laid_out() < most
        assert top
        # One that grows.
        answer = view.blocks[-2]
        assert isinstance(answer, AnswerBlock)
        view.follow()
        answer.reopen()
        for piece in (text, "\n\nPart 5000", " ends."):
            laid_out()
            answer.write(piece)
            view.changed(answer)
            await pilot.pause()
        assert "Part 5000 ends." in screen.shown(app)
        assert laid_out() < most
        # Step by step, everything comes once.
        await pilot.press("ctrl+home")
        seen = dict.fromkeys(numbers(app))
        while view.scroll_y < view.max_scroll_y:
            view.scroll_page_down(animate=False)
            await pilot.pause()
            seen |= dict.fromkeys(numbers(app))
            assert len(seen) < 60 or view.scroll_to(y=view.max_scroll_y, animate=False) is None
        assert list(seen)[:60] == list(range(60))


async def test_find_and_copy_in_huge_answer(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        view = screen.conversation(app)
        view.add(AnswerBlock(numbered(5000)))
        await pilot.press("ctrl+f", *"part 17")
        await until(pilot, lambda: count(app) == "111 of 111")  # the last is nearest to the end
        assert "Part 1799" in screen.shown(app)
        await pilot.press("enter")
        await until(pilot, lambda: count(app) == "1 of 111")
        assert highlighted(app) == ["[Part 17]"]
        await pilot.press("escape")
        # What is selected may begin and end far from what is laid out.
        await pilot.press("ctrl+home")
        first = next(y for y, line in enumerate(screen.lines(app)) if "Part 0" in line.text)
        begin, end = Offset(GUTTER + 5, first), Offset(0, 600)
        app.chat.selections = {view: Selection(begin, end)}
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app.clipboard.startswith("0"))
        found = [int(number) for number in re.findall(r"Part (\d+)", app.clipboard)]
        assert found == list(range(1, found[-1] + 1))
        assert len(found) > 50


# -- the window ------------------------------------------------------------------------------------


async def test_sizes(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        await pilot.press(*"draft", "ctrl+o")
        await pilot.resize_terminal(20, 5)
        await until(pilot, lambda: isinstance(app.screen, TooSmall))
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: not isinstance(app.screen, TooSmall))
        await pilot.press("escape")
        assert screen.composer(app).text == "draft"
        screen.composer(app).put("")
        for size in ((30, 8), (200, 60)):
            await pilot.resize_terminal(*size)
            await asked(pilot, "Hi " * 30)
            assert "Hello there." in screen.shown(app), size
            await pilot.press("/")
            assert screen.menu(app)
            screen.composer(app).put("")
        # The palette has every action.
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        await commands["List, search and open conversations"].callback()
        await pilot.pause()
        assert app.screen is not app.chat


async def test_without_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    Image.new("RGB", (8, 4), "red").save(tmp_path / "a.png")
    model = FakeModel(sees=True)
    model.answer = ["# Title\n\nSome `code`:\n\n```python\nreturn 0\n```\n"]

    def styles() -> list[Style]:
        return [part.style for line in screen.lines(app) for part in line if part.style]

    async with running(model) as (app, pilot):
        await asked(pilot, f"@{tmp_path / 'a.png'}")
        assert "a.png, 8 x 4" in screen.shown(app)
        assert "▀" not in screen.shown(app)
        for keys in ([], ["/", "down"], ["escape", "ctrl+f", "t"]):
            await pilot.press(*keys)
            if keys:  # the row, the match or the option that is chosen is told apart all the same
                await until(pilot, lambda: any(s.reverse or s.underline for s in styles()))
            assert not any(style.color or style.bgcolor for style in styles()), keys


# -- the panel -------------------------------------------------------------------------------------


def panel(app: ChatApp) -> LivePanel:
    return app.query_one(LivePanel)


async def test_panel(tmp_path: Path) -> None:
    """It is where the terminal has room, and as it was when the app was left."""
    for expected in (False, True):
        async with running(WatchedModel(), size=(100, 30), config=tmp_path) as (app, pilot):
            assert panel(app).is_open is expected
            await pilot.press("f3")
            await until(pilot, lambda app=app, was=expected: panel(app).is_open is not was)
    assert "panel" not in (tmp_path / "config.toml").read_text("utf-8")
    async with running(FakeModel(), size=(100, 30)) as (app, pilot):  # it can keep nothing
        await pilot.press("f3")
        await until(pilot, lambda: panel(app).region.x > 0)
        await pilot.resize_terminal(60, 24)
        await until(pilot, lambda: panel(app).region.x == 0)
        assert panel(app).region.height < 10
        assert screen.composer(app).region.width > 50


async def test_panel_during_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.tui.chat.panel._SECONDS", 0.05)
    monkeypatch.setattr("localrt.tui.chat.panel._QUIET_S", 0.02)
    model = WatchedModel()
    async with running(model, size=(100, 30)) as (app, pilot):
        model.hold()
        await screen.say(pilot, "Hi")
        await pilot.pause(0.15)
        assert model.looks == []  # hidden: nobody looks
        await pilot.press("ctrl+l")
        await until(pilot, lambda: len(model.looks) > 2)
        assert model.advised == 0, "never beside an answer"
        model.now = STREAMED
        model.allow(100)
        await until(pilot, lambda: idle(app) and "1.8 GB/s" in str(panel(app).render()))
        await until(pilot, lambda: "110 MB more RAM" in str(panel(app).render()))
        count = len(model.looks)
        await asked(pilot, "Hi")
        await pilot.pause(0.15)
        assert model.advised == 1
        count = len(model.looks)
        await pilot.pause(0.15)
        assert 0 < len(model.looks) <= count + 1  # idle
        assert screen.conversation(app).region.width < 100
        await pilot.press("f3")
        await until(pilot, lambda: screen.conversation(app).region.width == 100)
        assert model.looks[-1] is False  # lanes are not recorded for nobody


# -- finding words ---------------------------------------------------------------------------------

WRAPPED = "The sea is wide and many sailors cross it, " * 3 + "and **whales** sleep in it."


def count(app: ChatApp) -> str:
    return str(app.query_one("#find-count", Static).render())


def highlighted(app: ChatApp) -> list[str]:
    """The texts that have the background of a match, from top to bottom; the one that was gone to
    in brackets."""
    view = screen.conversation(app)
    now = view.get_component_rich_style("conversation--match-now")
    match = view.get_component_rich_style("conversation--match")
    found = []
    for y in range(view.size.height):
        line: Strip = view.render_line(y).crop(GUTTER)
        for part in line:
            if part.style is not None and part.style.bgcolor == now.bgcolor:
                found.append(f"[{part.text}]")
            elif part.style is not None and part.style.bgcolor == match.bgcolor:
                found.append(part.text)
    return found


async def test_find(model: FakeModel) -> None:
    model.answer = [WRAPPED]
    async with running(model) as (app, pilot):
        await asked(pilot, "Do Whales sleep in the sea?")
        bar = app.query_one(FindBar)
        assert not bar.display
        await pilot.press("ctrl+f", *"whales sleep")
        assert screen.composer(app).text == ""
        # Bold and plain; "1 of 2" is also the count of what was typed before.
        await until(pilot, lambda: highlighted(app) == ["[Whales sleep]", "whales", " sleep"])
        await pilot.press("enter")
        await until(pilot, lambda: count(app) == "2 of 2")
        assert highlighted(app) == ["Whales sleep", "[whales]", "[ sleep]"]
        for key, text in (("ctrl+f", "1 of 2"), ("up", "2 of 2"), ("down", "1 of 2")):
            await pilot.press(key)  # round the ends
            await until(pilot, lambda text=text: count(app) == text)
        bar.query_one(Input).value = "no such"
        await until(pilot, lambda: count(app) == "not found")
        assert highlighted(app) == []
        await pilot.press("enter", "escape")
        assert not bar.display

        # A match over two lines.
        await pilot.resize_terminal(60, 24)
        await screen.say(pilot, "/find many  sailors cross it, the SEA is wide")
        await until(pilot, lambda: count(app) == "1 of 2")
        parts = highlighted(app)
        assert len(parts) > 2
        assert " ".join(parts[:2]).strip("[]").replace("] [", " ").startswith("many sailors")
        await pilot.press("escape")
        assert highlighted(app) == []

        # Of an answer that grows.
        model.answer = ["One penguin. ", "A second penguin."]
        model.hold()
        await screen.say(pilot, "And?")
        model.allow(1)
        await until(pilot, lambda: screen.answers(app)[-1] == "One penguin. ")
        await pilot.press("ctrl+f", *"penguin")
        await until(pilot, lambda: highlighted(app) == ["[penguin]"])
        model.release()
        await until(pilot, lambda: highlighted(app) == ["[penguin]", "penguin"])


# -- pictures --------------------------------------------------------------------------------------

Compare = Callable[..., bool]


def test_answer(snap_compare: Compare) -> None:
    app = app_for(FakeLoader(FakeModel([DOCUMENT])))

    async def before(pilot: Pilot[Any]) -> None:
        app.theme = "textual-dark"
        screen.composer(app).cursor_blink = False
        await asked(pilot, "Show me\nyour Markdown")

    assert snap_compare(app, terminal_size=(80, 46), run_before=before)


def test_panel_while_streaming(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an answer, the panel standing still."""
    monkeypatch.setattr("localrt.tui.chat.panel._SECONDS", 3600.0)
    said = "The sky is blue because air scatters short waves of light more than long ones. "
    model = WatchedModel([said * 3, "never"])
    model.hold()
    model.allow(1)
    app = app_for(FakeLoader(model))

    async def before(pilot: Pilot[Any]) -> None:
        app.theme = "localrt-dark"
        screen.composer(app).cursor_blink = False
        await until(pilot, lambda: idle(app))
        await pilot.press("f3")
        await screen.say(pilot, "Why is the sky blue?")
        await until(pilot, lambda: screen.answers(app) == [said * 3])
        panel(app)._data = VIEW
        panel(app)._draw()
        await pilot.pause()

    assert snap_compare(app, terminal_size=(100, 30), run_before=before)
