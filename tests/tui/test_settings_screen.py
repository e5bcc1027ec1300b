"""The settings screen: what it shows, what it changes, and how it says no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static, TextArea

from localrt.tui.commands import OPTIONS
from localrt.tui.conversation.state import ChatState, Defaults
from localrt.tui.preferences import PreferencesFile, Preset, PresetsFile
from localrt.tui.screens.dialogs import Ask
from localrt.tui.screens.settings import PickTheme, SettingsScreen
from localrt.tui.themes import offered, register
from tests.tui.conftest import until
from tests.tui.fakes import FakeModel


class Bare(App[None]):
    CSS_PATH = Path(__file__).parents[2] / "tui" / "app.tcss"

    def __init__(self, folder: Path, *, model: bool = True) -> None:
        super().__init__()
        self.state = ChatState(None, model="tiny", system=None, options={}, on_problem=print)
        if model:
            self.state.take_model(FakeModel())  # type: ignore[arg-type]
        self.preferences, self.presets = PreferencesFile(folder), PresetsFile(folder)
        self.panel: list[bool] = []
        self.settings = SettingsScreen(
            self.state,
            self.preferences,
            self.presets,
            keys={"New conversation": "Ctrl+N"},
            show_panel=self.panel.append,
        )

    @property
    def options(self) -> dict[str, Any]:
        assert self.state.session is not None
        return self.state.session.chat.options

    def set(self, option: str, system: str = "") -> None:
        """Options and system prompt of the conversation, as slash commands would."""
        assert self.state.session is not None
        self.state.session.set(option)
        if system:
            self.state.session.system(system)

    def on_unmount(self) -> None:
        self.state.close()

    def on_mount(self) -> None:
        register(self)
        self.push_screen(self.settings)


def rows(app: Bare) -> list[str]:
    options = app.settings.query_one(OptionList)
    return [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]


def row(app: Bare, name: str) -> str:
    return next(row for row in rows(app) if row.strip().startswith(name))


async def choose(pilot: Pilot[None], app: Bare, name: str, key: str = "enter") -> None:
    """Go to the row and press a key."""
    await until(pilot, lambda: app.settings.query(OptionList) and rows(app))
    place = next(i for i, row in enumerate(rows(app)) if row.strip().startswith(name))
    app.settings.query_one(OptionList).highlighted = place
    await pilot.pause()
    await pilot.press(key)
    await pilot.pause()


async def typed(pilot: Pilot[None], text: str) -> None:
    pilot.app.screen.query_one(Input).value = text
    await pilot.press("enter")
    await pilot.pause()


def told(app: Bare) -> list[str]:
    return [note.message for note in app._notifications]


@pytest.fixture
def app(tmp_path: Path) -> Bare:
    return Bare(tmp_path)


async def test_options(app: Bare) -> None:
    async with app.run_test(size=(100, 50)) as pilot:
        await pilot.pause()
        for name in OPTIONS:
            assert row(app, name)
        assert "0.2 (default)" in row(app, "temperature")
        assert "40 (default)" in row(app, "top_k")  # the library's own
        await choose(pilot, app, "Theme", "home")
        assert "Colours" in str(app.settings.query_one("#help", Static).render())

        await choose(pilot, app, "temperature")
        assert isinstance(app.screen, Ask)
        await typed(pilot, "0.7")
        assert app.options == {"temperature": 0.7}
        assert "0.7" in row(app, "temperature")
        assert "default" not in row(app, "temperature")
        await choose(pilot, app, "temperature", "delete")
        assert app.options == {}
        assert "0.2 (default)" in row(app, "temperature")

        # What is wrong is said where it was typed.
        for name, value in (("temperature", "hot"), ("top_p", "7"), ("seed", "-1")):
            await choose(pilot, app, name)
            await typed(pilot, value)
            assert isinstance(app.screen, Ask)  # asked again
            assert name in str(app.screen.query_one("#problem", Static).render())
            assert app.options == {}
            await pilot.press("escape")
            assert app.screen is app.settings


async def test_prompt_presets_defaults_and_panel(app: Bare) -> None:
    async with app.run_test(size=(100, 50)) as pilot:
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
        app.set("temperature 0.3", "You review code.")
        await choose(pilot, app, "Save as a preset")
        await typed(pilot, "")
        assert "1 to 60 characters" in str(app.screen.query_one("#problem", Static).render())
        await typed(pilot, "Review")
        assert app.presets.find("Review") == Preset(
            "Review", "You review code.", {"temperature": 0.3}
        )
        app.set("temperature 0.9")
        app.set("seed 3")
        await choose(pilot, app, "Review")
        await pilot.press("enter")  # use it
        await pilot.pause()
        assert app.options == {"temperature": 0.3}
        await choose(pilot, app, "Review")
        await pilot.press("down", "down", "enter")
        await pilot.pause()
        await pilot.press("y")
        await pilot.pause()
        assert app.presets.list() == []

        # New conversations begin with these.
        app.set("temperature 0.3", "Be brief.")
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
        assert app.panel == [True]
        assert "open" in row(app, "Live panel")
        assert "Ctrl+N" in row(app, "New conversation  ")
        assert any("config.toml" in row.replace("\n  ", "") for row in rows(app))


async def test_pick_theme(app: Bare) -> None:
    async with app.run_test(size=(100, 44)) as pilot:
        await pilot.pause()
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
    app = Bare(tmp_path, model=False)
    async with app.run_test(size=(100, 40)) as pilot:
        await choose(pilot, app, "temperature")
        await typed(pilot, "0.5")
        assert "still loading" in str(app.screen.query_one("#problem", Static).render())


async def test_themes_of_16_colors(tmp_path: Path, monkeypatch: Any) -> None:
    app = Bare(tmp_path)
    async with app.run_test():
        everything = offered(app)
        assert everything[:2] == ["localrt-dark", "localrt-light"]
        monkeypatch.setattr(type(app.console), "color_system", property(lambda self: "standard"))
        assert offered(app) == ["ansi-dark", "ansi-light"]  # type: ignore[arg-type]
