"""What the app does for the person in front of it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from textual.events import Paste

from localrt.common.errors import ContextOverflowError, LocalrtError, ModelNotFoundError
from localrt.common.progress import Progress
from localrt.tui.chat.bars import Phase
from localrt.tui.loading_line import LoadingLine
from localrt.tui.screens.dialogs import Ask, Choose, Confirm, HelpScreen
from tests.tui import screen
from tests.tui.conftest import asked, cleared, running, until
from tests.tui.fakes import FakeLoader, FakeModel
from tests.tui.screen import idle


async def test_sent_while_loading() -> None:
    model = FakeModel(notes=("no chat template: plain format",))
    step = Progress("load", 50_000_000, 100_000_000, "bytes")
    loader = FakeLoader(model, held=True, steps=[step])
    async with running(loader, ready=False, system="Be brief.", options={"seed": 7}) as (
        app,
        pilot,
    ):
        await screen.say(pilot, "first")
        await screen.say(pilot, "second")
        await pilot.press(*"draft")
        assert screen.waiting(app) == ["first", "second"]
        line = app.query_one(LoadingLine)
        await until(pilot, lambda: "50%" in str(line.render()))
        assert "50 MB of 100 MB" in str(line.render())
        loader.gate.set()
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        assert model.given("user") == ["first", "second"]
        assert screen.composer(app).text == "draft"
        assert not line.display
        # Model and notes are above what was written.
        assert screen.kinds(app)[:3] == ["Notice", "Notice", "UserTurn"]
        assert "llama 135M, Q4_1 on cpu" in screen.notices(app)[0]
        assert screen.notices(app)[1] == "no chat template: plain format"
        assert "native Q4_1" in screen.footer(app)
        # The command line's system prompt and options reach the chat.
        assert model.last_chat.system == "Be brief."
        assert model.last_chat.options == {"seed": 7}
    assert model.closed


async def test_answers(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        await pilot.press(*"Hi", "space", *"you", "enter")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        assert screen.users(app) == ["Hi you"]
        assert screen.composer(app).text == ""
        assert "41.2 tok/s" in screen.footer(app)
        assert "context 4 of 8.2k" in screen.footer(
            app
        )  # two words of prompt, two tokens of answer

        # A message sent during an answer follows it.
        await cleared(pilot)
        model.hold()
        await screen.say(pilot, "one")
        await screen.say(pilot, "two")
        model.allow(100)
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        turns = [kind for kind in screen.kinds(app) if kind != "Notice"]
        assert turns == ["UserTurn", "AnswerBlock", "UserTurn", "AnswerBlock"]

        # Escape stops and keeps the text.
        await cleared(pilot)
        model.hold()
        await screen.say(pilot, "Hi")
        model.allow(1)
        await until(pilot, lambda: screen.answers(app) == ["Hello"])
        assert "Esc stop" in screen.footer(app)
        await pilot.press("escape")
        await until(pilot, lambda: idle(app))
        assert screen.answers(app) == ["Hello"]
        assert screen.marks(app) == ["stopped"]
        assert model.last_chat.messages[-1]["content"] == "Hello"

        # It gives waiting messages back.
        await cleared(pilot)
        for text in ("one", "two", "//three"):
            await screen.say(pilot, text)
        assert screen.waiting(app) == ["two", "/three"]
        assert "2 messages wait" in screen.hint(app)
        await pilot.press("escape")
        assert screen.users(app) == ["one"]
        assert screen.composer(app).text == "two\n\n//three"
        assert not idle(app), "the answer goes on"
        await pilot.press("escape")
        await until(pilot, lambda: idle(app))
        assert screen.composer(app).text == "one\n\ntwo\n\n//three"
        assert screen.composer(app).selected_text == "one"
        screen.composer(app).put("")

        # Prefill is shown in percent.
        await cleared(pilot)
        model.prefill = (10, 43)
        await screen.say(pilot, "a long story")
        await until(pilot, lambda: "reading prompt 43 %" in screen.footer(app))
        model.prefill = ()
        model.release()
        await pilot.press("escape")
        await until(pilot, lambda: idle(app))


WELCOME = (
    "smollm2 is small, for a first try. qwen3:30b (18 GB) runs well on this PC: F4 and its "
    "name get it. F1 lists the keys."
)


@pytest.mark.parametrize("size", [(80, 24), (40, 20)])
async def test_first_screen(model: FakeModel, size: tuple[int, int]) -> None:
    async with running(model, size=size, welcome=lambda: WELCOME) as (app, pilot):
        await until(pilot, lambda: WELCOME in screen.notices(app))
        assert " ".join(screen.shown(app).split()).endswith(WELCOME)
        assert len(screen.shown(app).splitlines()) < size[1] // 2


@pytest.mark.parametrize("fails", [False, True])
async def test_no_welcome(model: FakeModel, fails: bool) -> None:
    """It comes too late, or there is none."""
    gate = threading.Event()

    def welcome() -> str:
        gate.wait(60)
        if fails:
            raise OSError("no such GPU")
        return WELCOME

    async with running(model, welcome=welcome) as (app, pilot):
        await asked(pilot, "Hi")
        gate.set()
        await until(pilot, lambda: all(worker.is_finished for worker in app.workers))
        await asked(pilot, "You?")
        assert WELCOME not in screen.notices(app)


async def test_finish_reasons(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        model.finish_reason = "length"
        await asked(pilot, "Hi")
        assert "max_tokens" in screen.marks(app)[0]

        await cleared(pilot)
        model.finish_reason = "stop"
        model.answer = []
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.marks(app) == ["no answer"])

        # Why memory made it slower is said once.
        await cleared(pilot)
        model.answer = ["Hello."]
        model.memory = "40 MB of weights are read for each token: the budget was lowered"
        await asked(pilot, "Hi")
        await asked(pilot, "Hi")
        assert screen.notices(app).count(model.memory) == 1


async def test_answer_errors(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        # After some text, the text is kept.
        model.error = ContextOverflowError("the context is full")
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.notices(app, "error") and idle(app))
        assert screen.answers(app) == ["Hello there."]
        assert screen.composer(app).text == ""

        # A refused message comes back.
        await cleared(pilot)
        model.answer = []
        model.error = ContextOverflowError("the prompt has 9000 tokens, the context holds 8192")
        await screen.say(pilot, "much text")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert screen.notices(app, "error") == [str(model.error)]
        assert screen.composer(app).text == "much text"
        assert screen.users(app) == []
        assert screen.answers(app) == []
        model.answer, model.error = ["fine"], None
        await pilot.press("enter")
        await until(pilot, lambda: screen.answers(app) == ["fine"])


# -- errors of loading -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "options", "line"),
    [
        (ModelNotFoundError("no model org/x"), {}, "no model org/x"),
        (None, {"temperatur": 1}, "did you mean temperature?"),
        (
            ZeroDivisionError("division\nby zero"),
            {},
            "ZeroDivisionError: division (a bug in localrt",
        ),
    ],
)
async def test_load_error(
    model: FakeModel, error: Exception | None, options: dict[str, int], line: str
) -> None:
    async with running(FakeLoader(model, error=error), ready=False, options=options) as (
        app,
        pilot,
    ):
        await until(pilot, lambda: screen.phase(app) is Phase.FAILED)
        [shown] = screen.notices(app, "error")
        assert line in shown
        assert "\n" not in shown
        assert "Enter" in screen.notices(app)[-1]
        await pilot.press("enter")
        await pilot.pause()
    assert app.return_code == 1
    assert app.failure == shown  # what run_chat prints when the screen is gone


async def test_failed_load_keeps_text(model: FakeModel) -> None:
    loader = FakeLoader(model, error=LocalrtError("no such model"), held=True)
    async with running(loader, ready=False) as (app, pilot):
        await screen.say(pilot, "sent while it loads")
        assert screen.waiting(app) == ["sent while it loads"]
        loader.gate.set()
        await until(pilot, lambda: screen.phase(app) is Phase.FAILED)
        for _ in range(2):
            assert screen.composer(app).text == "sent while it loads"
            await pilot.press("enter")
        assert "Not sent: no model is loaded" in screen.hint(app)
        screen.composer(app).put("")
        await pilot.press("enter")
        await until(pilot, lambda: not app.is_running)


async def test_repeated_line(model: FakeModel) -> None:
    model.error, model.answer = LocalrtError("the disk is full"), []
    async with running(model) as (app, pilot):
        for _ in range(3):
            screen.composer(app).put("")
            await screen.say(pilot, "Hi")
            await until(pilot, lambda: screen.idle(app) and screen.composer(app).text == "Hi")
        assert screen.notices(app, "error") == ["the disk is full"]
        assert "the disk is full (3 times)" in screen.shown(app)


# -- leaving ---------------------------------------------------------------------------------------


def answering_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "localrt-answer"]


async def test_quit_during_answer(model: FakeModel) -> None:
    model.hold()
    async with running(model) as (app, pilot):
        await screen.say(pilot, "Hi")
        assert answering_threads()
        await screen.say(pilot, "/QUIT")
    assert not answering_threads()
    assert model.closed
    assert not app.return_code


async def test_ctrl_c(model: FakeModel) -> None:
    model.hold()
    async with running(model) as (app, pilot):
        await pilot.press(*"some", "shift+home", "ctrl+c")
        assert app.clipboard == "some"
        assert "again quits" not in screen.hint(app)
        await pilot.press("end", "ctrl+c")
        assert screen.composer(app).text == ""
        assert "again quits" not in screen.hint(app)
        await pilot.press("alt+z")
        assert screen.composer(app).text == "some"
        await pilot.press("ctrl+c")
        await screen.say(pilot, "Hi")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "again quits" in screen.hint(app))
        await until(pilot, lambda: idle(app))
        assert app.is_running
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)


@pytest.mark.parametrize("typed", ["a", "backspace", "left", "paste"])
async def test_typing_disarms_ctrl_c(model: FakeModel, typed: str) -> None:
    """Only a second Ctrl+C in a row quits."""
    async with running(model) as (app, pilot):
        await pilot.press("ctrl+c")
        assert "again quits" in screen.hint(app)
        if typed == "paste":
            app.post_message(Paste("some text"))
            await pilot.pause()
        else:
            await pilot.press(typed)
        assert "again quits" not in screen.hint(app)
        await pilot.press("ctrl+c")
        assert app.is_running
        screen.composer(app).clear()
        await pilot.press("ctrl+c", "ctrl+c")
        await until(pilot, lambda: not app.is_running)


DIALOGS = pytest.mark.parametrize(
    ("dialog", "answer"),
    [
        (lambda: Choose("Which?", [("a", "A"), ("b", "B")]), "a"),
        (lambda: Confirm("Sure?", "go on"), True),
        (lambda: Ask("Name", "x"), "x"),
    ],
    ids=["choose", "confirm", "ask"],
)


@DIALOGS
async def test_two_keys_close_a_window_once(dialog: Any, answer: Any) -> None:
    """The second one came before the first had closed it: the window below stays."""
    async with running(FakeModel()) as (app, pilot):
        found: list[Any] = []
        below, above = HelpScreen(), dialog()
        app.push_screen(below)
        app.push_screen(above, found.append)
        await until(pilot, lambda: app.screen is above)
        for _ in range(3):
            above.dismiss(answer)
        await until(pilot, lambda: app.screen is below)
        await pilot.pause()
        assert found == [answer]
        assert app.screen is below


@DIALOGS
async def test_a_covered_window_stays(dialog: Any, answer: Any) -> None:
    """Its key came before the one that opened the window above: that window is not closed."""
    async with running(FakeModel()) as (app, pilot):
        found: list[Any] = []
        below, above = dialog(), HelpScreen()
        app.push_screen(below, found.append)
        app.push_screen(above)
        await until(pilot, lambda: app.screen is above)
        below.dismiss(answer)
        await pilot.pause()
        assert app.screen is above
        assert found == []
        above.dismiss()
        await until(pilot, lambda: app.screen is below)
        below.dismiss(answer)
        await until(pilot, lambda: app.screen is app.chat)
        assert found == [answer]


async def test_a_closed_window_is_freed() -> None:
    """With its lines, although a cache of Textual's knows it."""
    async with running(FakeModel()) as (app, pilot):

        async def opened() -> weakref.ref[Any]:
            window = HelpScreen()
            app.push_screen(window)
            await until(pilot, lambda: app.screen is window and window.key_line.size.width)
            window.key_line.render_lines(window.key_line.size.region)
            window.dismiss()
            return weakref.ref(window.key_line._styles_cache)

        lines = await opened()
        await until(pilot, lambda: app.screen is app.chat)
        await until(pilot, lambda: gc.collect() >= 0 and lines() is None)
