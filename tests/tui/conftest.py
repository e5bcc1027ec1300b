"""The same terminal for every test, and apps over a fake model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from localrt.tui import ChatApp
from tests.tui.fakes import FakeLoader, FakeModel

SIZE = (80, 24)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


def app_for(loader: FakeLoader, **arguments: Any) -> ChatApp:
    settings: dict[str, Any] = {"model_name": "tiny-model", "system": None, "options": {}}
    return ChatApp(loader, **{**settings, **arguments})


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Let the app run until the condition holds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the app did not get there in time"
        await pilot.pause(0.01)
    await pilot.pause()
