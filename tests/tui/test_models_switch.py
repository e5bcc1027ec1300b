"""Another model in the place of the present one, in the app."""

from __future__ import annotations

import threading
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from localrt import History
from localrt.common.errors import CancelledError, CheckpointError, StorageError
from localrt.common.progress import Progress, ProgressCallback
from localrt.tui import ChatApp
from localrt.tui.chat.bars import Phase
from localrt.tui.screens.dialogs import Confirm
from localrt.tui.screens.models import ModelsScreen
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.fakes import FakeLoader, FakeModel
from tests.tui.screen import idle
from tests.tui.test_models_screen import FakeLibrary


class Shelf:
    """``load_by_name`` of the app: models by name; waits for ``gate``."""

    def __init__(self) -> None:
        self.first = FakeModel(name="smollm2")
        self.models: dict[str, Any] = {"org/chat:Q4_K_M": FakeModel(name="org/chat:Q4_K_M")}
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.unloaded_first: bool | None = None

    def __call__(self, name: str, progress: ProgressCallback) -> Any:
        self.asked.append(name)
        self.unloaded_first = self.first.unloaded
        while not self.gate.wait(0.005):
            progress(Progress("load", 1, 2, "bytes"))
        found = self.models[name]
        if isinstance(found, Exception):
            raise found
        return found

    def running(self, **arguments: Any) -> AbstractAsyncContextManager[tuple[ChatApp, Pilot[None]]]:
        return running(self.first, load_by_name=self, **arguments)


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLibrary(monkeypatch)


async def test_switch_model() -> None:
    shelf = Shelf()
    async with shelf.running() as (app, pilot):
        await asked(pilot, "Hi")
        await pilot.press("f4")
        await until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        await until(pilot, lambda: app.screen.query("#room").first().render().plain)  # type: ignore[union-attr]
        await pilot.press("up", "enter")
        await until(pilot, lambda: idle(app) and shelf.asked == ["org/chat:Q4_K_M"])
        assert shelf.unloaded_first is True  # never two models in memory
        assert shelf.first.chats[-1].closed
        assert screen.answers(app) == ["Hello there."]  # the conversation is still there
        assert any("So far with smollm2" in line for line in screen.notices(app))
        await screen.say(pilot, "And you?")
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        other = shelf.models["org/chat:Q4_K_M"]
        assert other.given() == ["Hi", "Hello there.", "And you?"]
    assert other.closed


async def test_sent_while_switching() -> None:
    shelf = Shelf()
    shelf.gate.clear()
    async with shelf.running() as (app, pilot):
        app.load_model("org/chat:Q4_K_M")
        await until(pilot, lambda: shelf.asked)
        await screen.say(pilot, "Hi")
        assert screen.waiting(app) == ["Hi"]
        assert screen.phase(app) is Phase.LOADING
        shelf.gate.set()
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))


async def test_failure_offers_previous_model() -> None:
    shelf = Shelf()
    shelf.models = {"broken": CheckpointError("broken.gguf is truncated"), "smollm2": shelf.first}
    async with shelf.running() as (app, pilot):
        app.load_model("broken")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        assert screen.notices(app, "error") == ["broken was not loaded: broken.gguf is truncated"]
        assert screen.phase(app) is Phase.EMPTY
        assert app.failure is None
        await pilot.press("n")
        await screen.say(pilot, "Hi")  # waits in line
        assert screen.waiting(app) == ["Hi"]
        app.load_model("smollm2")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and idle(app))
        app.load_model("broken")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await until(pilot, lambda: idle(app) and shelf.asked[-1] == "smollm2")


BOXES = {
    "a conversation": ("/delete",),
    "one of the list": ("ctrl+o", "down", "ctrl+d"),
    "a model": ("f4", "up", "ctrl+d"),
    "a model that does not fit": ("f4", "down", "about", "enter"),
    "the model before": ("broken",),
}


@pytest.mark.parametrize("box", BOXES)
async def test_enter_says_no_yes(box: str, tmp_path: Path) -> None:
    """Enter may be pressed twice, or meant for the composer: what is named is y."""
    shelf = Shelf()
    shelf.models["broken"] = CheckpointError("broken.gguf is truncated")
    with History(tmp_path / "h.db") as history:
        history.new(model="smollm2").add("user", "Before")
    async with shelf.running(history=lambda: History(tmp_path / "h.db")) as (app, pilot):
        await asked(pilot, "Hi")
        for step in BOXES[box]:
            if step == "broken":
                app.load_model(step)
            elif step == "about":
                about = app.screen.query_one("#about", Static)
                await until(pilot, lambda about=about: "does not fit" in str(about.render()))
            elif step.startswith("/"):
                await screen.say(pilot, step)
            else:
                await pilot.press(step)
                await until(pilot, lambda: getattr(app.screen, "chosen", app))
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        asked_for = list(shelf.asked)
        await pilot.press("enter", "enter")
        await pilot.pause()
        assert isinstance(app.screen, Confirm)
        await pilot.press("n")
        await until(pilot, lambda: not isinstance(app.screen, Confirm))
        assert screen.users(app) == ["Hi"]
        assert shelf.asked == asked_for
    with History(tmp_path / "h.db") as history:
        assert len(history.list()) == 2


async def test_escape_stops_loading() -> None:
    shelf = Shelf()
    shelf.gate.clear()
    async with shelf.running() as (app, pilot):
        app.load_model("org/chat:Q4_K_M")
        await until(pilot, lambda: shelf.asked)
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        assert any("stopped" in line for line in screen.notices(app))
        assert not app.stop_loading()  # nothing is left to stop


async def test_late_model_is_closed() -> None:
    shelf = Shelf()
    late = shelf.models["org/chat:Q4_K_M"]

    gate = threading.Event()

    def load(name: str, progress: ProgressCallback) -> Any:
        assert gate.wait(60)
        return late

    async with running(shelf.first, load_by_name=load) as (app, pilot):
        app.load_model("org/chat:Q4_K_M")
        await pilot.press("escape")
        gate.set()  # no progress is made after it
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        assert late.closed


async def test_switch_during_answer() -> None:
    shelf = Shelf()
    shelf.first.hold()
    async with shelf.running() as (app, pilot):
        await screen.say(pilot, "Hi")
        app.load_model("org/chat:Q4_K_M")
        await pilot.pause()
        assert shelf.asked == []
        assert "chat:Q4_K_M will be loaded when this answer ends" in screen.notices(app)[-1]
        await screen.say(pilot, "And you?")
        shelf.first.release()
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        assert shelf.asked == ["org/chat:Q4_K_M"]
        assert shelf.models["org/chat:Q4_K_M"].given()[-1] == "And you?"


async def test_switch_while_loading() -> None:
    shelf = Shelf()
    loader = FakeLoader(shelf.first, held=True)
    async with running(loader, ready=False, load_by_name=shelf) as (app, pilot):
        app.load_model("org/chat:Q4_K_M")
        await pilot.pause()
        assert shelf.asked == []
        loader.gate.set()
        await until(pilot, lambda: shelf.asked == ["org/chat:Q4_K_M"] and idle(app))
        assert shelf.first.closed


async def test_model_after_failed_start() -> None:
    shelf = Shelf()
    loader = FakeLoader(shelf.first, error=CancelledError("no"))
    async with running(loader, ready=False, load_by_name=shelf) as (app, pilot):
        await until(pilot, lambda: screen.phase(app) is Phase.FAILED)
        assert "F4" in screen.notices(app)[-1]
        app.load_model("org/chat:Q4_K_M")
        await until(pilot, lambda: idle(app))
        assert app.failure is None
    assert app.return_code in (0, None)


async def test_models_of_a_server() -> None:
    def list_models() -> list[tuple[str, str]]:
        if not there:
            raise StorageError("the server does not answer")
        return there

    there: list[tuple[str, str]] = []
    shelf = Shelf()
    async with shelf.running(list_models=list_models) as (app, pilot):

        def rows() -> list[str]:
            listed = app.screen.query_one(OptionList)
            return [
                str(listed.get_option_at_index(row).prompt) for row in range(listed.option_count)
            ]

        await pilot.press("f4")
        await until(pilot, lambda: rows() == ["the server does not answer"])
        await pilot.press("escape")
        there += [("smollm2", "context 8,192 · loaded"), ("org/chat:Q4_K_M", "")]
        await screen.say(pilot, "/models chat")
        await until(pilot, lambda: rows() == ["  org/chat:Q4_K_M"])
        await pilot.press("escape")
        await until(pilot, lambda: rows()[0] == "● smollm2\n  context 8,192 · loaded")
        await pilot.press("down", "enter")
        await until(pilot, lambda: shelf.asked == ["org/chat:Q4_K_M"] and idle(app))


async def test_no_loader() -> None:
    async with running(FakeModel()) as (app, pilot):
        await pilot.press("f4")
        await until(pilot, lambda: screen.notices(app, "error"))
        assert "localrt chat MODEL" in screen.notices(app, "error")[0]
