"""Pictures of the app. `pytest tests/tui/test_snapshots.py --snapshot-update` draws them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from localrt.common.progress import Progress
from localrt.tui import ChatApp
from localrt.tui.chat.bars import Phase
from localrt.tui.chat.panel import LivePanel
from localrt.tui.loading_line import LoadingLine
from localrt.tui.screens.models import ModelsScreen
from tests.tui import screen
from tests.tui.conftest import app_for, asked, until
from tests.tui.fakes import VIEW, FakeLoader, FakeModel, WatchedModel
from tests.tui.test_drawing import DOCUMENT
from tests.tui.test_models import FakeLibrary, Shelf

Compare = Callable[..., bool]


def still(app: ChatApp) -> None:
    screen.composer(app).cursor_blink = False


async def ready(pilot: Pilot[Any]) -> ChatApp:
    app = pilot.app
    assert isinstance(app, ChatApp)
    still(app)
    await until(pilot, lambda: screen.phase(app) is Phase.READY)
    return app


async def answered(pilot: Pilot[Any], text: str) -> None:
    await ready(pilot)
    await asked(pilot, text)


def test_loading(snap_compare: Compare) -> None:
    step = Progress("download", 60_500_000, 97_000_000, "bytes", "SmolLM2-135M-Instruct.Q4_1.gguf")

    async def before(pilot: Pilot[Any]) -> None:
        app = pilot.app
        assert isinstance(app, ChatApp)
        still(app)
        await screen.say(pilot, "Why is the sky blue?")
        await until(pilot, lambda: app.query_one(LoadingLine).progress == step)

    loader = FakeLoader(FakeModel(), held=True, steps=[step])
    assert snap_compare(app_for(loader), terminal_size=(100, 20), run_before=before)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
def test_answer(snap_compare: Compare, theme: str) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        pilot.app.theme = theme
        await answered(pilot, "Show me\nyour Markdown")

    app = app_for(FakeLoader(FakeModel([DOCUMENT])))
    assert snap_compare(app, terminal_size=(80, 46), run_before=before)


ANSWER = ["The sky is blue because air scatters short waves of light more than long ones. "] * 3


async def streaming(pilot: Pilot[Any]) -> None:
    """In the middle of an answer, with the panel open and standing still."""
    app = await ready(pilot)
    panel = app.query_one(LivePanel)
    await pilot.press("f3")
    await screen.say(pilot, "Why is the sky blue?")
    await until(pilot, lambda: screen.answers(app) == ["".join(ANSWER)])
    panel._data = VIEW
    panel._draw()
    await pilot.pause()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """Answers no further than with the first piece, at which the panel looks once."""
    monkeypatch.setattr("localrt.tui.chat.panel._SECONDS", 3600.0)
    model = WatchedModel(["".join(ANSWER), "never"])
    model.hold()
    model.allow(1)
    return model


def test_panel_while_streaming(snap_compare: Compare, stopped: FakeModel) -> None:

    async def before(pilot: Pilot[Any]) -> None:
        pilot.app.theme = "localrt-dark"
        await streaming(pilot)

    assert snap_compare(app_for(FakeLoader(stopped)), terminal_size=(100, 30), run_before=before)


def test_panel_on_a_narrow_terminal(snap_compare: Compare, stopped: FakeModel) -> None:
    assert snap_compare(app_for(FakeLoader(stopped)), terminal_size=(60, 24), run_before=streaming)


def test_models_with_a_preview(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    # The row that is left at once is not planned for, however late the key comes.
    monkeypatch.setattr("localrt.tui.screens.models._PAUSE", 60.0)

    async def before(pilot: Pilot[Any]) -> None:
        app = await ready(pilot)
        await pilot.press("f4")
        await until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        models = app.screen
        models.query_one(Input).cursor_blink = False
        await until(pilot, lambda: models.query_one(OptionList).option_count == 3)
        monkeypatch.setattr("localrt.tui.screens.models._PAUSE", 0.1)
        await pilot.press("up")
        about = models.query_one("#about", Static)
        await until(pilot, lambda: "about 6 tok/s" in str(about.render()))

    FakeLibrary(monkeypatch)
    shelf = Shelf()
    app = app_for(FakeLoader(shelf.first), load_by_name=shelf)
    assert snap_compare(app, terminal_size=(100, 24), run_before=before)
