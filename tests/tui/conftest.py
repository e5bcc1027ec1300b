"""The same terminal for every test, and apps over a fake model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from textual._wait import wait_for_idle
from textual.pilot import Pilot

from localrt.tui import ChatApp
from tests.tui.fakes import FakeLoader, FakeModel

SIZE = (80, 24)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line goes, and no thread is given up, before a slow machine has come to look."""
    monkeypatch.setattr("localrt.tui.chat.hints._CONFIRM_SECONDS", 60.0)
    monkeypatch.setattr("localrt.tui.chat.hints._FLASH_SECONDS", 60.0)
    monkeypatch.setattr("localrt.tui.app._GOODBYE_SECONDS", 60.0)
    monkeypatch.setattr("textual.app.wait_for_idle", _settled)
    monkeypatch.setattr("textual.pilot.wait_for_idle", _settled)


async def _settled(min_sleep: float = 0.02, max_sleep: float = 1.0) -> None:
    """Textual's wait takes a process that gets no processor for an idle one: then go on until no
    message is on its way."""
    await wait_for_idle(min_sleep, max_sleep)
    loop: Any = asyncio.get_running_loop()
    deadline = time.monotonic() + 30
    while loop._ready and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


def app_for(loader: FakeLoader, **arguments: Any) -> ChatApp:
    settings: dict[str, Any] = {"model_name": "tiny-model", "system": None, "options": {}}
    return ChatApp(loader, **{**settings, **arguments})


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Let the app run until the condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the app did not get there in time"
        await pilot.pause(0.01)
    await pilot.pause()
