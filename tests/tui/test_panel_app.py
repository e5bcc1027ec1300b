"""Panel, settings and preferences in the app itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Static

from localrt.tui import ChatApp
from localrt.tui.chat.panel import LivePanel
from localrt.tui.screens.dialogs import Ask, HelpScreen
from localrt.tui.screens.settings import SettingsScreen
from tests.tui import screen
from tests.tui.conftest import asked, running, until
from tests.tui.panel_fakes import STREAMED, WatchedModel
from tests.tui.screen import idle


def panel(app: ChatApp) -> LivePanel:
    return app.query_one(LivePanel)


def config(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return folder


async def test_panel_remembered(tmp_path: Path) -> None:
    for expected in (False, True):
        async with running(WatchedModel(), size=(100, 30), config=tmp_path) as (app, pilot):
            await until(pilot, lambda app=app: idle(app))
            assert panel(app).is_open is expected
            await pilot.press("f3")
            await until(pilot, lambda app=app, was=expected: panel(app).is_open is not was)
    assert "panel" not in (tmp_path / "config.toml").read_text()


async def test_panel_during_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.tui.chat.panel._SECONDS", 0.15)
    monkeypatch.setattr("localrt.tui.chat.panel._QUIET_S", 0.05)
    model = WatchedModel()
    model.hold()
    async with running(model, size=(100, 30)) as (app, pilot):
        assert model.looks == []  # hidden: nobody looks
        await pilot.press("ctrl+l")
        await screen.say(pilot, "Hi")
        await asyncio.sleep(0.3)
        model.now = STREAMED
        model.allow(100)
        await until(pilot, lambda: idle(app) and "1.8 GB/s" in str(panel(app).render()))
        await until(pilot, lambda: "110 MB more RAM" in str(panel(app).render()))
        await until(pilot, lambda: len(model.looks) > 0)
        count = len(model.looks)
        await asyncio.sleep(0.2)
        assert len(model.looks) <= count + 1  # idle
        assert screen.conversation(app).region.width < 100
        await pilot.press("f3")
        await until(pilot, lambda: screen.conversation(app).region.width == 100)


async def test_preferences(tmp_path: Path) -> None:
    folder = config(
        tmp_path,
        'theme = "localrt-light"\nsystem = "Be brief."\n[generation]\ntemperature = 0.3\n'
        '[keys]\npanel = "f9"\n',
    )
    model = WatchedModel()
    async with running(model, size=(100, 30), config=folder) as (app, pilot):
        assert app.theme == "localrt-light"
        assert model.last_chat.system == "Be brief."
        assert model.last_chat.options == {"temperature": 0.3}
        await pilot.press("f3")
        await pilot.pause()
        assert not panel(app).is_open
        await pilot.press("f9")
        await until(pilot, lambda: panel(app).is_open)
        assert "F9 hides" in str(panel(app).render())
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        page = "".join(str(each.render()) for each in app.screen.query(Static))
        assert "F9" in page


async def test_bad_preferences(tmp_path: Path) -> None:
    text = 'theme = "mauve"\n[keys]\nnwe = "ctrl+l"\nnew = "q"\n'
    async with running(WatchedModel(), size=(100, 30), config=config(tmp_path, text)) as (
        app,
        pilot,
    ):
        told = screen.notices(app, "error")
        assert len(told) == 3
        assert "No theme 'mauve'" in told[0]
        assert "did you mean new?" in told[1]
        assert "is for typing" in told[2]
        await asked(pilot, "Hi")
    assert (tmp_path / "config.toml").read_text() == text


async def test_bad_config_file(tmp_path: Path) -> None:
    async with running(WatchedModel(), size=(100, 30), config=config(tmp_path, "theme = ")) as (
        app,
        pilot,
    ):
        assert "is not TOML" in screen.notices(app, "error")[0]
        await pilot.press("f3")
        await until(pilot, lambda: panel(app).is_open and len(screen.notices(app, "error")) > 1)
        assert "Not saved" in screen.notices(app, "error")[1]
    assert (tmp_path / "config.toml").read_text() == "theme = "


async def test_adapter(tmp_path: Path) -> None:
    model = WatchedModel()
    model.adapters = ("style", "facts")
    async with running(model, size=(100, 30), config=tmp_path) as (app, pilot):
        await screen.say(pilot, "/adapter")
        assert screen.notices(app)[-1].split() == ["style", "facts"]
        await screen.say(pilot, "/adapter facts")
        assert "+facts" in screen.notices(app)[-1]
        assert model.last_chat.options["adapter"] == "facts"
        await screen.say(pilot, "/adapter")
        assert "> facts" in screen.notices(app)[-1]
        await screen.say(pilot, "/adapter none")
        assert "+" not in screen.notices(app)[-1]


async def test_settings_and_presets(tmp_path: Path) -> None:
    (tmp_path / "presets.toml").write_text('[Review]\nsystem = "You review."\nseed = 3\n')
    config(tmp_path, 'system = "Be brief."\n[generation]\ntemperature = 0.3\nmin_p = 0.1\n')
    model = WatchedModel()
    given: dict[str, Any] = {"system": "Be long.", "options": {"temperature": 0.9}}
    async with running(model, size=(100, 30), config=tmp_path, **given) as (app, pilot):
        # The command line counts more than preferences.
        assert model.last_chat.system == "Be long."
        assert model.last_chat.options == {"temperature": 0.9, "min_p": 0.1}
        await screen.say(pilot, "/preset")
        assert "Review: seed 3, “You review.”" in screen.notices(app)[-1]
        await screen.say(pilot, "/preset review")
        assert model.last_chat.options == {"seed": 3}
        assert model.last_chat.system == "You review."
        await screen.say(pilot, "/preset nothing")
        assert "available: Review" in screen.notices(app, "error")[-1]
        await screen.say(pilot, "/settings")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        await pilot.press("down", "down", "down", "down", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press(*"0.7", "enter")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, SettingsScreen))
        assert model.last_chat.options == {"seed": 3, "temperature": 0.7}


async def test_no_config_folder() -> None:
    async with running(WatchedModel(), size=(100, 30)) as (app, pilot):
        await pilot.press("f3")
        app.remember(theme="nord")
        await until(pilot, lambda: panel(app).region.x > 0)
        assert screen.notices(app, "error") == []
        await pilot.resize_terminal(60, 24)
        await until(pilot, lambda: panel(app).region.x == 0)
        assert panel(app).region.height < 10
        assert screen.composer(app).region.width > 50
