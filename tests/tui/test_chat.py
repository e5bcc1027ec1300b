"""What the app does for the person in front of it, from the first message to the last key."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from localrt.common.errors import LocalrtError, StorageError
from localrt.common.progress import Progress
from localrt.tui.chat.bars import Phase
from localrt.tui.loading_line import LoadingLine
from localrt.tui.screens.dialogs import HelpScreen
from tests.tui import screen
from tests.tui.conftest import asked, cleared, running, until
from tests.tui.fakes import FakeLoader, FakeModel
from tests.tui.screen import idle


async def test_sent_while_loading() -> None:
    model = FakeModel(notes=("no chat template: plain format",))
    step = Progress("load", 50_000_000, 100_000_000, "bytes")
    loader = FakeLoader(model, held=True, steps=[step])
    given: dict[str, Any] = {"system": "Be brief.", "options": {"seed": 7}}
    async with running(loader, ready=False, **given) as (app, pilot):
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
        assert screen.kinds(app)[:4] == ["Notice", "Notice", "Notice", "UserTurn"]
        assert screen.notices(app)[0] == "System prompt: Be brief."
        assert "llama 135M, Q4_1 on cpu" in screen.notices(app)[1]
        assert screen.notices(app)[2] == "no chat template: plain format"
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
        # Two words of prompt, two tokens of answer.
        assert "context 4 of 8.2k" in screen.footer(app)

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


async def test_how_answers_end(model: FakeModel) -> None:
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

        # After an error, what there was of the answer is kept.
        await cleared(pilot)
        model.error = StorageError("the context is full")
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.notices(app, "error") and idle(app))
        assert screen.answers(app) == ["Hello."]
        assert screen.composer(app).text == ""

        # A refused message comes back, and an error that is repeated is one line.
        await cleared(pilot)
        model.answer = []
        model.error = StorageError("the prompt has 9000 tokens, the context holds 8192")
        await screen.say(pilot, "much text")
        for count in (1, 2):
            await until(pilot, lambda: idle(app) and screen.composer(app).text == "much text")
            assert screen.notices(app, "error") == [str(model.error)]
            assert ("(2 times)" in screen.shown(app)) is (count == 2)
            assert screen.users(app) == screen.answers(app) == []
            if count == 2:
                model.answer, model.error = ["fine"], None
            await pilot.press("enter")
            await pilot.pause()
        await until(pilot, lambda: screen.answers(app) == ["fine"])


WELCOME = (
    "smollm2 is small, for a first try. qwen3:30b (18 GB) runs well on this PC: F4 and its "
    "name get it. F1 lists the keys."
)


async def test_first_screen(model: FakeModel) -> None:
    async with running(model, size=(40, 20), welcome=lambda: WELCOME) as (app, pilot):
        await until(pilot, lambda: WELCOME in screen.notices(app))
        assert " ".join(screen.shown(app).split()).endswith(WELCOME)
        assert len(screen.shown(app).splitlines()) < 10


@pytest.mark.parametrize(
    ("error", "options", "line"),
    [
        (None, {"temperatur": 1}, "did you mean temperature?"),
        (ZeroDivisionError("a\nb"), {}, "ZeroDivisionError: a (a bug in localrt"),
    ],
)
async def test_load_error(
    model: FakeModel, error: Exception | None, options: dict[str, int], line: str
) -> None:
    loader = FakeLoader(model, error=error)
    async with running(loader, ready=False, options=options) as (app, pilot):
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
        assert screen.composer(app).text == "sent while it loads"
        await pilot.press("enter")
        assert "Not sent: no model is loaded" in screen.hint(app)


# -- commands --------------------------------------------------------------------------------------


async def test_commands_without_a_model(model: FakeModel) -> None:
    model.hold()
    loader = FakeLoader(model, held=True)
    async with running(loader, ready=False) as (app, pilot):
        await screen.say(pilot, "/help")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        await screen.say(pilot, "/tmp/file is what?")
        assert screen.notices(app, "error")[0].startswith("No command /tmp/file: /help")
        assert screen.users(app) == []
        await screen.say(pilot, "/set temperature 0.3")
        await screen.say(pilot, "/system Be brief.")
        assert screen.notices(app)[-1] == "/system runs when the model is ready"
        loader.gate.set()
        await until(pilot, lambda: idle(app))
        assert model.last_chat.options == {"temperature": 0.3}
        assert model.last_chat.system == "Be brief."
        await screen.say(pilot, "//etc is what?")
        assert screen.users(app) == ["/etc is what?"]
        await screen.say(pilot, "/regenerate")  # another name of /retry
        assert "Esc stops it" in screen.notices(app, "error")[-1]
        assert screen.composer(app).text == "/retry"  # not lost
        screen.composer(app).put("")
        await screen.say(pilot, "/clear")  # the old name of /new
        assert "will open when this answer ends" in screen.notices(app)[-1]
        model.release()
        await until(pilot, lambda: screen.users(app) == [] and idle(app))


async def test_system_and_set(model: FakeModel) -> None:
    async with running(model) as (app, pilot):
        await screen.say(pilot, "/system")
        assert screen.notices(app)[-1] == "No system prompt: /system TEXT sets one"
        await screen.say(pilot, "/system Be brief.\nBe kind.")
        assert model.last_chat.system == "Be brief.\nBe kind."
        await screen.say(pilot, "/system")
        shown = "System prompt (/system none removes it): Be brief.\nBe kind."
        assert screen.notices(app)[-1] == shown
        await screen.say(pilot, "/system none")
        assert model.last_chat.system is None

        for line in ("max-tokens 40", "stop 5", "ignore_eos true"):
            await screen.say(pilot, f"/set {line}")
        assert model.last_chat.options == {"max_tokens": 40, "stop": "5", "ignore_eos": True}
        await screen.say(pilot, "/set")
        listing = [" ".join(line.split()) for line in screen.notices(app)[-1].splitlines()]
        assert {"max_tokens 40", "temperature 0.2 (default)", "seed -"} <= set(listing)
        for name in ("max_tokens", "stop"):
            await screen.say(pilot, f"/set {name} none")
        assert model.last_chat.options == {"ignore_eos": True}
        assert screen.notices(app, "error") == []
        for count, line in enumerate(("temperature -1", "tempertaure 1", "top_p"), 1):
            await screen.say(pilot, f"/set {line}")
            assert len(screen.notices(app, "error")) == count
            assert model.last_chat.options == {"ignore_eos": True}


async def test_new_export_and_load(
    model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, markdown = tmp_path / "chat.json", tmp_path / "notes.txt"
    markdown.write_text("mine")
    model.answer = ["<think>hm</think>", "# Yes\n"]
    async with running(model, system="Be brief.") as (app, pilot):
        await asked(pilot, "Really?")
        await screen.say(pilot, f"/export {path}")
        await until(pilot, path.exists)
        await screen.say(pilot, f"/export {markdown}")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert markdown.read_text("utf-8") == "mine"  # another's file is asked about first
        await screen.say(pilot, f"/export {markdown}")
        await until(pilot, lambda: markdown.read_text("utf-8") != "mine")
        await screen.say(pilot, "/export")
        await until(pilot, lambda: list(tmp_path.glob("really-20*.md")))

        await screen.say(pilot, "/new")
        await until(pilot, lambda: not screen.users(app))
        assert screen.answers(app) == screen.notices(app, "error") == []
        assert model.last_chat.messages == [{"role": "system", "content": "Be brief."}]
        await until(pilot, lambda: model.chats[0].closed)
        assert "context 0 of 8.2k" in screen.footer(app)

        await screen.say(pilot, f"/load {path}")
        await until(pilot, lambda: screen.users(app) == ["Really?"])
        assert app.state.conversation.system == "Be brief."
        await asked(pilot, "again")
        await screen.say(pilot, f"/export {path}")  # its own file: no question
        await until(pilot, lambda: len(json.loads(path.read_text("utf-8"))["messages"]) == 5)
        assert screen.notices(app, "error") == []
        await screen.say(pilot, "/load nowhere/chat.json")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert screen.users(app) == ["Really?", "again"]
    lines = markdown.read_text("utf-8").splitlines()
    assert lines[0] == "# Really?"
    assert lines[2].startswith("*tiny-model, 20")
    assert [line for line in lines[3:] if line] == [
        *("## System prompt", "Be brief.", "## You", "Really?", "## Model"),
        *("<details><summary>Thinking</summary>", "hm", "</details>", "# Yes"),
    ]


async def test_open_saved_chat(model: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    path.write_text(json.dumps({"version": 1, "messages": said, "options": {"top_k": 3}}))
    loader = FakeLoader(model, held=True)
    given: dict[str, Any] = {"system": "Be brief.", "options": {"seed": 1}}
    async with running(loader, ready=False, chat_path=path, **given) as (app, pilot):
        await screen.say(pilot, "written while it loads")
        loader.gate.set()
        await until(pilot, lambda: screen.answers(app) == ["Yes?", "Hello there."])
        assert screen.users(app) == ["Hi", "written while it loads"]
        assert model.last_chat.system == "Be brief."
        assert model.last_chat.options == {"seed": 1, "top_k": 3}


# -- windows ---------------------------------------------------------------------------------------


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
        # Only a second one in a row quits: whatever is typed between them disarms it.
        for typed in ("a", "backspace"):
            screen.composer(app).clear()
            await pilot.press("ctrl+c")
            assert "again quits" in screen.hint(app)
            await pilot.press(typed)
            assert "again quits" not in screen.hint(app)
            await pilot.press("ctrl+c")
            assert app.is_running
            await pilot.press("a", "ctrl+c")
        # It stops an answer, too.
        await screen.say(pilot, "Hi")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "again quits" in screen.hint(app))
        await until(pilot, lambda: idle(app))
        assert app.is_running
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)
