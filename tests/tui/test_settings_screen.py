"""The settings screen in the app: what it shows, what it changes, and how it says no."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static, TextArea

from localrt.tui import ChatApp
from localrt.tui.conversation.state import Defaults, Session
from localrt.tui.preferences import Preset
from localrt.tui.screens.dialogs import Ask
from localrt.tui.screens.settings import PickTheme, SettingsScreen
from localrt.tui.text import OPTIONS
from localrt.tui.themes import offered
from tests.tui.conftest import running, until
from tests.tui.fakes import FakeLoader, FakeModel


@asynccontextmanager
async def settings(
    folder: Path, *, loaded: bool = True
) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    """The app with its settings open."""
    loader = FakeLoader(FakeModel(), held=not loaded)
    async with running(loader, size=(100, 50), ready=loaded, config=folder) as (app, pilot):
        await pilot.press("f5")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen) and len(rows(app)) > 1)
        yield app, pilot


def session(app: ChatApp) -> Session:
    assert app.state.session is not None
    return app.state.session


def rows(app: ChatApp) -> list[str]:
    options = app.screen.query_one(OptionList)
    return [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]


def row(app: ChatApp, name: str) -> str:
    return next(row for row in rows(app) if row.strip().startswith(name))


async def choose(pilot: Pilot[None], app: ChatApp, name: str, key: str = "enter") -> None:
    """Go to the row and press a key."""
    place = next(i for i, row in enumerate(rows(app)) if row.strip().startswith(name))
    app.screen.query_one(OptionList).highlighted = place
    await pilot.pause()
    await pilot.press(key)
    await pilot.pause()


async def typed(pilot: Pilot[None], text: str) -> None:
    pilot.app.screen.query_one(Input).value = text
    await pilot.press("enter")
    await pilot.pause()


async def test_options(tmp_path: Path) -> None:
    async with settings(tmp_path) as (app, pilot):
        for name in OPTIONS:
            assert row(app, name)
        assert "0.2 (default)" in row(app, "temperature")
        assert "40 (default)" in row(app, "top_k")  # the library's own
        await choose(pilot, app, "Theme", "home")
        assert "Colours" in str(app.screen.query_one("#help", Static).render())

        await choose(pilot, app, "temperature")
        assert isinstance(app.screen, Ask)
        await typed(pilot, "0.7")
        assert session(app).chat.options == {"temperature": 0.7}
        assert "0.7" in row(app, "temperature")
        assert "default" not in row(app, "temperature")
        await choose(pilot, app, "temperature", "delete")
        assert session(app).chat.options == {}
        assert "0.2 (default)" in row(app, "temperature")

        # What is wrong is said where it was typed.
        for name, value in (("temperature", "hot"), ("top_p", "7"), ("seed", "-1")):
            await choose(pilot, app, name)
            await typed(pilot, value)
            assert isinstance(app.screen, Ask)  # asked again
            assert name in str(app.screen.query_one("#problem", Static).render())
            assert session(app).chat.options == {}
            await pilot.press("escape")
            assert isinstance(app.screen, SettingsScreen)


async def test_prompt_presets_defaults_and_panel(tmp_path: Path) -> None:
    async with settings(tmp_path) as (app, pilot):
        # A system prompt of several lines.
        await choose(pilot, app, "System prompt")
        app.screen.query_one(TextArea).text = "Be brief.\nBe kind."
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert app.state.conversation.system == "Be brief.\nBe kind."
        assert "Be brief. Be kind." in row(app, "System prompt")
        await choose(pilot, app, "System prompt", "delete")
        assert app.state.conversation.system is None

        # Presets are saved, used and deleted.
        session(app).set("temperature 0.3")
        session(app).system("You review code.")
        await choose(pilot, app, "Save as a preset")
        await typed(pilot, "")
        assert "1 to 60 characters" in str(app.screen.query_one("#problem", Static).render())
        await typed(pilot, "Review")
        assert app.state.presets.find("Review") == Preset(
            "Review", "You review code.", {"temperature": 0.3}
        )
        session(app).set("temperature 0.9")
        session(app).set("seed 3")
        await choose(pilot, app, "Review")
        await pilot.press("enter")  # use it
        await pilot.pause()
        assert session(app).chat.options == {"temperature": 0.3}
        await choose(pilot, app, "Review")
        await pilot.press("down", "down", "enter")
        await pilot.pause()
        await pilot.press("y")
        await pilot.pause()
        assert app.state.presets.list() == []

        # New conversations begin with these.
        session(app).set("temperature 0.3")
        session(app).system("Be brief.")
        await choose(pilot, app, "Begin with these")
        loaded = app.preferences.load()
        assert (dict(loaded.options), loaded.system) == ({"temperature": 0.3}, "Be brief.")
        assert app.state.defaults == Defaults("Be brief.", {"temperature": 0.3})
        app.state.new()
        assert app.state.conversation.system == "Be brief."
        assert dict(app.state.conversation.options) == {"temperature": 0.3}
        await choose(pilot, app, "Begin with defaults")
        assert dict(app.preferences.load().options) == {}
        assert app.state.defaults == Defaults()

        # The panel and the keys.
        await choose(pilot, app, "Live panel")
        assert app.chat.panel.is_open
        assert "open" in row(app, "Live panel")
        assert "Ctrl+N" in row(app, "New conversation  ")
        assert any("config.toml" in row.replace("\n  ", "") for row in rows(app))


async def test_pick_theme(tmp_path: Path) -> None:
    async with settings(tmp_path) as (app, pilot):
        before = app.theme
        await choose(pilot, app, "Theme")
        assert isinstance(app.screen, PickTheme)
        await pilot.press("home")
        await pilot.pause()
        assert app.theme == "localrt-dark"
        await pilot.press("escape")
        await pilot.pause()
        assert app.theme == before
        await choose(pilot, app, "Theme")
        await pilot.press("home", "down", "enter")
        await pilot.pause()
        assert app.theme == app.preferences.load().theme == "localrt-light"


async def test_options_while_loading(tmp_path: Path) -> None:
    async with settings(tmp_path, loaded=False) as (app, pilot):
        await choose(pilot, app, "temperature")
        await typed(pilot, "0.5")
        assert "still loading" in str(app.screen.query_one("#problem", Static).render())


async def test_themes_of_16_colors(monkeypatch: Any) -> None:
    async with running(FakeModel()) as (app, _):
        everything = offered(app)
        assert everything[:2] == ["localrt-dark", "localrt-light"]
        monkeypatch.setattr(type(app.console), "color_system", property(lambda self: "standard"))
        assert offered(app) == ["ansi-dark", "ansi-light"]
