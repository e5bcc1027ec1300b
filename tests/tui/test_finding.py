"""Finding words in the open conversation: matches in sight, far away, wrapped and in Markdown."""

from __future__ import annotations

from textual.strip import Strip
from textual.widgets import Input, Static

from localrt.tui import ChatApp
from localrt.tui.chat.blocks import GUTTER, Answer, Block, UserTurn
from localrt.tui.chat.lines import FindBar
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeModel

WRAPPED = "The sea is wide and many sailors cross it, " * 3 + "and **whales** sleep in it."


def count(app: ChatApp) -> str:
    return str(app.query_one("#find-count", Static).render())


def highlighted(app: ChatApp) -> list[str]:
    """The texts that have the background of a match, from top to bottom; the one that was gone to
    in brackets."""
    view = screen.conversation(app)
    styles = view._style()
    found = []
    for y in range(view.size.height):
        line: Strip = view.render_line(y).crop(GUTTER)
        for part in line:
            if part.style is not None and part.style.bgcolor == styles.found_now.bgcolor:
                found.append(f"[{part.text}]")
            elif part.style is not None and part.style.bgcolor == styles.found.bgcolor:
                found.append(part.text)
    return found


async def test_match_in_chinese(model: FakeModel) -> None:
    model.answer = ["Python " + "一二三四五六七八九十" * 8]
    async with running(model) as (app, pilot):
        await asked(pilot, "Hi")
        await pilot.press("ctrl+f")
        app.query_one(FindBar).query_one(Input).value = "九十一二"
        await until(pilot, lambda: count(app) == "1 of 7")
        assert "".join(highlighted(app)).count("九") == 7


async def test_find(model: FakeModel) -> None:
    model.answer = [WRAPPED]
    async with running(model) as (app, pilot):
        await asked(pilot, "Do Whales sleep in the sea?")
        bar = app.query_one(FindBar)
        assert not bar.display
        await pilot.press("ctrl+f", *"whales sleep")
        assert screen.composer(app).text == ""
        await until(pilot, lambda: count(app) == "1 of 2")
        assert highlighted(app) == ["[Whales sleep]", "whales", " sleep"]  # bold and plain
        await pilot.press("enter")
        await until(pilot, lambda: count(app) == "2 of 2")
        assert highlighted(app) == ["Whales sleep", "[whales]", "[ sleep]"]
        for key, text in (("ctrl+f", "1 of 2"), ("up", "2 of 2"), ("down", "1 of 2")):
            await pilot.press(key)  # round the ends
            await until(pilot, lambda text=text: count(app) == text)
        app.query_one(FindBar).query_one(Input).value = "no such"
        await until(pilot, lambda: count(app) == "not found")
        assert highlighted(app) == []
        await pilot.press("enter", "escape")
        assert not bar.display
        await pilot.press(*"Hi")
        assert screen.composer(app).text == "Hi"


async def test_match_over_two_lines(model: FakeModel) -> None:
    model.answer = [WRAPPED]
    async with running(model, size=(60, 24)) as (app, pilot):
        await asked(pilot, "Hi")
        await screen.say(pilot, "/find many  sailors cross it, the SEA is wide")
        await until(pilot, lambda: count(app) == "1 of 2")
        parts = highlighted(app)
        assert len(parts) > 2
        assert " ".join(parts[:2]).strip("[]").replace("] [", " ").startswith("many sailors")
        await pilot.press("escape")
        assert highlighted(app) == []


async def test_match_out_of_sight(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        view = screen.conversation(app)
        turns: list[Block] = []
        for number in range(200):
            turns += [UserTurn(f"question {number}"), Answer(f"answer {number}\n\n" * 3)]
        view.add(*turns)
        await pilot.press("ctrl+f", *"question 17")
        await until(pilot, lambda: highlighted(app) == ["[question 17]"])
        assert "question 179" in screen.shown(app), "the nearest one above"
        assert count(app) == "11 of 11"  # 17, and 170 to 179
        for _ in range(10):
            await pilot.press("up")
        await until(pilot, lambda: count(app) == "1 of 11")
        await until(pilot, lambda: "question 17\n" in screen.shown(app))
        await pilot.press("up")
        await until(pilot, lambda: "question 179" in screen.shown(app))
        laid_out = sum(block.laid_out for block in view.blocks)
        assert laid_out < 100, "what has no match and is out of sight is not laid out"


async def test_find_in_growing_answer(model: FakeModel) -> None:
    model.answer = ["One whale. ", "A second whale."]
    model.hold()
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Hi")
        model.allow(1)
        await until(pilot, lambda: screen.answers(app) == ["One whale. "])
        await pilot.press("ctrl+f", *"whale")
        await until(pilot, lambda: highlighted(app) == ["[whale]"])
        model.release()
        await until(pilot, lambda: highlighted(app) == ["[whale]", "whale"])
        await pilot.press("f3")  # wraps anew
        await until(pilot, lambda: highlighted(app) == ["[whale]", "whale"])
