"""The same terminal for every test, and apps over a fake model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from textual.css import stylesheet
from textual.css.model import RuleSet
from textual.css.parse import parse
from textual.pilot import Pilot

from localrt import History, system
from localrt.tui import ChatApp
from tests.tui import screen
from tests.tui.fakes import FakeLoader, FakeModel
from tests.waits import wait_in_loop

SIZE = (80, 24)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line goes, and no thread is given up, before a slow machine has come to look."""
    monkeypatch.setattr("localrt.tui.chat.bars._CONFIRM_SECONDS", 60.0)
    monkeypatch.setattr("localrt.tui.chat.bars._FLASH_SECONDS", 60.0)
    monkeypatch.setattr("localrt.tui.app._GOODBYE_SECONDS", 60.0)
    monkeypatch.setattr("localrt.tui.screens.dialogs._QUIET_SECONDS", 0.0)
    monkeypatch.setattr("textual.app.wait_for_idle", _settled)
    monkeypatch.setattr("textual.pilot.wait_for_idle", _settled)
    monkeypatch.setattr(Pilot, "_wait_for_screen", _settled)
    monkeypatch.setattr(stylesheet, "parse", _parsed)


_PAUSE_S = 0.01 if system.IS_WINDOWS else 0.0  # there Textual's timers are threads that sleep


async def _settled(*arguments: object) -> bool:
    """In the place of Textual's waits, which sleep 20 ms at a time until the process is idle, take
    one that gets no processor for idle, and ask every widget: until no message is on its way."""
    loop: Any = asyncio.get_running_loop()
    deadline = time.monotonic() + 30
    quiet = 0
    while quiet < 3 and time.monotonic() < deadline:
        await asyncio.sleep(_PAUSE_S)
        quiet = 0 if loop._ready else quiet + 1
    return True


def _parsed(scope: str, css: str, read_from: Any, variable_tokens: Any, **how: Any) -> Any:
    """Textual's own widgets are parsed once for all apps of a theme, not once for each app."""
    variables = tuple((name, tuple(tokens)) for name, tokens in variable_tokens.items())
    return _rules(scope, css, read_from, variables, **how)


@cache
def _rules(scope: str, css: str, read_from: Any, variables: Any, **how: Any) -> list[RuleSet]:
    return list(parse(scope, css, read_from, variable_tokens=dict(variables), **how))


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


Opening = Callable[[], History]


@pytest.fixture
def opening(tmp_path: Path) -> Opening:
    """Opens the history of one folder."""
    return lambda: History(tmp_path / "history.db")


def app_for(loader: FakeLoader, **arguments: Any) -> ChatApp:
    settings: dict[str, Any] = {"model_name": "tiny-model", "system": None, "options": {}}
    return ChatApp(loader, **{**settings, **arguments})


@asynccontextmanager
async def running(
    source: FakeModel | FakeLoader,
    *,
    size: tuple[int, int] = SIZE,
    ready: bool = True,
    **arguments: Any,
) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    """The app over a fake model, started; with ``ready`` the model is there."""
    app = app_for(source if isinstance(source, FakeLoader) else FakeLoader(source), **arguments)
    async with app.run_test(size=size) as pilot:
        if ready:
            await until(pilot, lambda: screen.idle(app))
        yield app, pilot


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Let the app run until the condition holds."""
    await wait_in_loop(condition, lambda: asyncio.sleep(0.005))
    await pilot.pause()


async def asked(pilot: Pilot[None], text: str) -> None:
    """Send a message and wait for its answer."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await until(pilot, lambda: screen.idle(app))
    count = len(screen.answers(app))
    await screen.say(pilot, text)
    await until(pilot, lambda: len(screen.answers(app)) > count and screen.idle(app))


async def cleared(pilot: Pilot[None]) -> None:
    """Begin a new conversation."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    screen.composer(app).put("")
    await pilot.press("ctrl+n")
    await until(pilot, lambda: not screen.users(app))


@pytest.fixture(autouse=True)
def _no_clipboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clipboard of whoever runs the tests stays as it is."""
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setattr("localrt.tui.app.copied_by_tool", lambda text: False)
