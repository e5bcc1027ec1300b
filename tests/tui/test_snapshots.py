"""Pictures of the app. `pytest tests/tui/test_snapshots.py --snapshot-update` draws them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from localrt.tui import ChatApp
from localrt.tui.chat.bars import Phase
from localrt.tui.chat.panel import LivePanel
from tests.tui import screen
from tests.tui.conftest import app_for, asked, until
from tests.tui.fakes import VIEW, FakeLoader, FakeModel, WatchedModel
from tests.tui.test_drawing import DOCUMENT

Compare = Callable[..., bool]


def still(app: ChatApp) -> None:
    screen.composer(app).cursor_blink = False


async def ready(pilot: Pilot[Any]) -> ChatApp:
    app = pilot.app
    assert isinstance(app, ChatApp)
    still(app)
    await until(pilot, lambda: screen.phase(app) is Phase.READY)
    return app


def test_answer(snap_compare: Compare) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        pilot.app.theme = "textual-dark"
        await ready(pilot)
        await asked(pilot, "Show me\nyour Markdown")

    app = app_for(FakeLoader(FakeModel([DOCUMENT])))
    assert snap_compare(app, terminal_size=(80, 46), run_before=before)


def test_panel_while_streaming(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an answer, the panel standing still."""
    monkeypatch.setattr("localrt.tui.chat.panel._SECONDS", 3600.0)
    said = "The sky is blue because air scatters short waves of light more than long ones. "
    model = WatchedModel([said * 3, "never"])
    model.hold()
    model.allow(1)

    async def before(pilot: Pilot[Any]) -> None:
        pilot.app.theme = "localrt-dark"
        app = await ready(pilot)
        panel = app.query_one(LivePanel)
        await pilot.press("f3")
        await screen.say(pilot, "Why is the sky blue?")
        await until(pilot, lambda: screen.answers(app) == [said * 3])
        panel._data = VIEW
        panel._draw()
        await pilot.pause()

    assert snap_compare(app_for(FakeLoader(model)), terminal_size=(100, 30), run_before=before)
