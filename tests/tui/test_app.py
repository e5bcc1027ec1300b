"""What the app does for the person in front of it."""

from __future__ import annotations

import threading

import pytest

from localrt.errors import ContextOverflowError, ModelNotFoundError
from localrt.progress import Progress
from localrt.tui import ChatApp
from localrt.tui.chat.footer import Phase
from localrt.tui.loading_line import LoadingLine
from tests.tui import screen
from tests.tui.conftest import SIZE, app_for, until
from tests.tui.fakes import FakeLoader, FakeModel


def idle(app: ChatApp) -> bool:
    return screen.phase(app) is Phase.READY and not screen.waiting(app)


async def test_type_and_send(model: FakeModel) -> None:
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await pilot.press(*"Hi", "space", *"you", "enter")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        assert screen.users(app) == ["Hi you"]
        assert screen.composer(app).text == ""
        assert "41.2 tok/s" in screen.footer(app)
        assert "4/8.2k" in screen.footer(app)  # two words of prompt, two tokens of answer
    assert model.closed


async def test_system_and_options_reach_the_chat(model: FakeModel) -> None:
    app = app_for(FakeLoader(model), system="Be brief.", options={"seed": 7})
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        assert model.last_chat.system == "Be brief."
        assert model.last_chat.options == {"seed": 7}


async def test_messages_written_while_loading_are_sent_in_order(model: FakeModel) -> None:
    loader = FakeLoader(
        model, held=True, steps=[Progress("load", 50_000_000, 100_000_000, "bytes")]
    )
    app = app_for(loader)
    async with app.run_test(size=SIZE) as pilot:
        await screen.say(pilot, "first")
        await screen.say(pilot, "second")
        await pilot.press(*"draft")
        assert screen.waiting(app) == ["first", "second"]
        await until(pilot, lambda: "50%" in str(app.query_one(LoadingLine).render()))
        assert "50 MB of 100 MB" in str(app.query_one(LoadingLine).render())
        loader.gate.set()
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        assert [m["content"] for m in model.last_chat.messages if m["role"] == "user"] == [
            "first",
            "second",
        ]
        assert screen.composer(app).text == "draft"
        assert not app.query_one(LoadingLine).display


async def test_model_and_notes_are_shown_above_what_was_written() -> None:
    loader = FakeLoader(FakeModel(notes=("no chat template: plain format",)), held=True)
    app = app_for(loader)
    async with app.run_test(size=SIZE) as pilot:
        await screen.say(pilot, "first")
        loader.gate.set()
        await until(pilot, lambda: idle(app))
        assert screen.kinds(app)[:3] == ["Notice", "Notice", "UserTurn"]
        assert "llama 135M, q4_1 on cpu" in screen.notices(app)[0]
        assert screen.notices(app)[1] == "no chat template: plain format"
        assert "native q4_1" in screen.footer(app)


async def test_escape_stops_and_keeps_the_text(model: FakeModel) -> None:
    model.hold()
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        model.allow(1)
        await until(pilot, lambda: screen.answers(app) == ["Hello"])
        assert "Esc stop" in screen.footer(app)
        await pilot.press("escape")
        await until(pilot, lambda: idle(app))
        assert screen.answers(app) == ["Hello"]
        assert screen.marks(app) == ["stopped"]
        assert model.last_chat.messages[-1]["content"] == "Hello"


async def test_escape_gives_waiting_messages_back(model: FakeModel) -> None:
    model.hold()
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "one")
        await screen.say(pilot, "two")
        await screen.say(pilot, "//three")
        assert screen.waiting(app) == ["two", "/three"]
        assert "2 messages wait" in screen.hint(app)
        await pilot.press("escape")
        await until(pilot, lambda: idle(app))
        assert screen.users(app) == ["one"]
        assert screen.composer(app).text == "two\n\n//three"


async def test_a_message_sent_during_an_answer_follows_it(model: FakeModel) -> None:
    model.hold()
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "one")
        await screen.say(pilot, "two")
        model.allow(100)
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        assert screen.kinds(app) == ["Notice", "UserTurn", "Answer", "UserTurn", "Answer"]


async def test_prefill_is_shown_in_percent(model: FakeModel) -> None:
    model.hold()
    model.prefill = (10, 43)
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "a long story")
        await until(pilot, lambda: "prefill 43 %" in screen.footer(app))


async def test_an_answer_cut_off_says_so(model: FakeModel) -> None:
    model.finish_reason = "length"
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.marks(app))
        assert "max_tokens" in screen.marks(app)[0]


async def test_it_says_once_why_memory_made_it_slower(model: FakeModel) -> None:
    model.memory = "40 MB of weights are read for each token: the budget was lowered"
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        for count in (1, 2):
            await screen.say(pilot, "Hi")
            await until(pilot, lambda n=count: len(screen.answers(app)) == n and idle(app))  # type: ignore[misc]
        assert screen.notices(app).count(model.memory) == 1


async def test_an_answer_without_text_says_so(model: FakeModel) -> None:
    model.answer = []
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.marks(app) == ["no answer"])


# -- errors ----------------------------------------------------------------------------------------


async def test_a_load_error_is_a_line_in_the_app(model: FakeModel) -> None:
    error = ModelNotFoundError("no model org/nothing on the hub: check the name")
    app = app_for(FakeLoader(model, error=error))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: screen.phase(app) is Phase.FAILED)
        assert screen.notices(app, "error") == [str(error)]
        assert "Enter" in screen.notices(app)[-1]
        await pilot.press("enter")
        await pilot.pause()
    assert app.return_code == 1
    assert app.failure == str(error)  # what run_chat prints when the screen is gone


async def test_bad_options_are_a_load_error(model: FakeModel) -> None:
    app = app_for(FakeLoader(model), options={"temperatur": 1})
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: screen.phase(app) is Phase.FAILED)
        assert "did you mean temperature?" in screen.notices(app, "error")[0]


async def test_a_bug_while_loading_is_one_line_too(model: FakeModel) -> None:
    app = app_for(FakeLoader(model, error=ZeroDivisionError("division\nby zero")))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: screen.phase(app) is Phase.FAILED)
        [line] = screen.notices(app, "error")
        assert line.startswith("ZeroDivisionError: division (a bug in localrt")


async def test_a_refused_message_comes_back(model: FakeModel) -> None:
    model.answer = []
    model.error = ContextOverflowError("the prompt has 9000 tokens, the context holds 8192")
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "much text")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert screen.notices(app, "error") == [str(model.error)]
        assert screen.composer(app).text == "much text"
        assert screen.users(app) == []
        assert screen.answers(app) == []
        model.answer, model.error = ["fine"], None
        await pilot.press("enter")
        await until(pilot, lambda: screen.answers(app) == ["fine"])


async def test_an_error_after_some_text_keeps_the_text(model: FakeModel) -> None:
    model.error = ContextOverflowError("the context is full")
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert screen.answers(app) == ["Hello there."]
        assert screen.composer(app).text == ""


async def test_control_characters_never_reach_the_terminal() -> None:
    app = app_for(FakeLoader(FakeModel(["a\x1b[31mred\x9b2J"])))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi \x1b]0;title\x07")
        await until(pilot, lambda: screen.answers(app) and idle(app))
        picture = app.export_screenshot()
        assert "\x1b" not in picture
        assert "\x9b" not in picture
        assert "red" in picture


# -- leaving ---------------------------------------------------------------------------------------


def answering_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "localrt-answer"]


async def test_quitting_during_an_answer_ends_its_thread(model: FakeModel) -> None:
    model.hold()
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        assert answering_threads()
        await pilot.press("ctrl+q")
    assert not answering_threads()
    assert model.closed
    assert not app.return_code


async def test_quitting_while_loading_ends_the_load(model: FakeModel) -> None:
    app = app_for(FakeLoader(model, held=True))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+q")
    assert not answering_threads()


async def test_ctrl_c_stops_then_quits(model: FakeModel) -> None:
    model.hold()
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "again quits" in screen.hint(app))
        await until(pilot, lambda: idle(app))
        assert app.is_running
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)


async def test_ctrl_c_copies_a_selection(model: FakeModel) -> None:
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await pilot.press(*"some", "shift+home", "ctrl+c")
        assert app.clipboard == "some"
        assert "again quits" not in screen.hint(app)


@pytest.mark.parametrize("text", ["/quit", "/QUIT"])
async def test_quit_command(model: FakeModel, text: str) -> None:
    app = app_for(FakeLoader(model))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, text)
    assert not app.return_code
