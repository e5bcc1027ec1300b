"""Pictures of the app. `pytest tests/tui/test_snapshots.py --snapshot-update` draws them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from localrt.engine.types import Progress
from localrt.errors import ModelNotFoundError
from localrt.tui import ChatApp
from localrt.tui.footer import Phase
from localrt.tui.loading import LoadingLine
from tests.tui import screen
from tests.tui.conftest import app_for, until
from tests.tui.fakes import FakeLoader, FakeModel
from tests.tui.test_markdown import DOCUMENT

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
    app = await ready(pilot)
    count = len(screen.answers(app))
    await screen.say(pilot, text)
    await until(
        pilot,
        lambda: len(screen.answers(app)) > count and screen.phase(app) is Phase.READY,
    )


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


def test_stopped_on_a_narrow_terminal(snap_compare: Compare) -> None:
    model = FakeModel(["The sky is blue because ", "of Rayleigh scattering."], notes=("a note",))
    model.hold()

    async def before(pilot: Pilot[Any]) -> None:
        app = await ready(pilot)
        await screen.say(pilot, "Why is the sky blue, and why is the sunset red and orange?")
        model.allow(1)
        await until(pilot, lambda: screen.answers(app) == ["The sky is blue because "])
        await pilot.press("escape")
        await until(pilot, lambda: screen.phase(app) is Phase.READY)

    assert snap_compare(app_for(FakeLoader(model)), terminal_size=(60, 20), run_before=before)


def test_help_and_completion(snap_compare: Compare) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        await ready(pilot)
        await screen.say(pilot, "/help")
        await pilot.press(*"/s")

    assert snap_compare(app_for(FakeLoader(FakeModel())), terminal_size=(80, 34), run_before=before)


def test_load_error(snap_compare: Compare) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        app = pilot.app
        assert isinstance(app, ChatApp)
        still(app)
        await until(pilot, lambda: screen.phase(app) is Phase.FAILED)

    error = ModelNotFoundError("no model org/nothing on the hub: check the name, or give a folder")
    loader = FakeLoader(FakeModel(), error=error)
    assert snap_compare(app_for(loader), terminal_size=(80, 14), run_before=before)


def test_sixteen_colors(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLORTERM")

    async def before(pilot: Pilot[Any]) -> None:
        await answered(pilot, "Hi")

    app = app_for(FakeLoader(FakeModel(["# Title\n\nSome `code`:\n\n```c\nreturn 0;\n```"])))
    assert snap_compare(app, terminal_size=(60, 16), run_before=before)
