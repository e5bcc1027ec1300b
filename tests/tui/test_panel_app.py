"""Panel, settings and preferences in the app itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from textual.widgets import Static

from localrt.tui import ChatApp
from localrt.tui.chat.footer import Phase
from localrt.tui.chat.panel import LivePanel
from localrt.tui.screens.dialogs import Ask
from localrt.tui.screens.help import HelpScreen
from localrt.tui.screens.settings import SettingsScreen
from tests.tui import screen
from tests.tui.conftest import app_for, until
from tests.tui.fakes import FakeLoader
from tests.tui.panel_fakes import STREAMED, WatchedModel


def ready(app: ChatApp) -> bool:
    return screen.phase(app) is Phase.READY


def panel(app: ChatApp) -> LivePanel:
    return app.query_one(LivePanel)


def config(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return folder


async def test_the_panel_is_remembered(tmp_path: Path) -> None:
    for expected in (False, True):
        app = app_for(FakeLoader(WatchedModel()), config=tmp_path)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda app=app: ready(app))
            assert panel(app).is_open is expected
            await pilot.press("f3")
            await until(pilot, lambda app=app, was=expected: panel(app).is_open is not was)
    assert "panel" not in (tmp_path / "config.toml").read_text()


async def test_the_panel_follows_an_answer() -> None:
    model = WatchedModel()
    model.hold()
    app = app_for(FakeLoader(model))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
        assert model.looks == []  # hidden: nobody looks
        await pilot.press("ctrl+l")
        await screen.say(pilot, "Hi")
        await asyncio.sleep(0.3)
        model.now = STREAMED
        model.allow(100)
        await until(pilot, lambda: ready(app) and "1.8 GB/s" in str(panel(app).render()))
        await until(pilot, lambda: "110 MB more RAM" in str(panel(app).render()))
        await until(pilot, lambda: len(model.looks) > 0)
        count = len(model.looks)
        await asyncio.sleep(0.6)
        assert len(model.looks) <= count + 1  # idle
        assert screen.conversation(app).region.width < 100
        await pilot.press("f3")
        await until(pilot, lambda: screen.conversation(app).region.width == 100)


async def test_preferences_are_there_at_the_start(tmp_path: Path) -> None:
    folder = config(
        tmp_path,
        'theme = "localrt-light"\nsystem = "Be brief."\n[generation]\ntemperature = 0.3\n'
        '[keys]\npanel = "f9"\n',
    )
    model = WatchedModel()
    app = app_for(FakeLoader(model), config=folder)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
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


async def test_the_command_line_is_over_preferences(tmp_path: Path) -> None:
    folder = config(tmp_path, 'system = "Be brief."\n[generation]\ntemperature = 0.3\nseed = 1\n')
    model = WatchedModel()
    app = app_for(FakeLoader(model), config=folder, system="Be long.", options={"temperature": 0.9})
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
        assert model.last_chat.system == "Be long."
        assert model.last_chat.options == {"temperature": 0.9, "seed": 1}


async def test_what_is_wrong_is_told_and_the_app_works(tmp_path: Path) -> None:
    text = 'theme = "mauve"\n[keys]\nnwe = "ctrl+l"\nnew = "q"\n'
    app = app_for(FakeLoader(WatchedModel()), config=config(tmp_path, text))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
        told = screen.notices(app, "error")
        assert len(told) == 3
        assert "There is no theme 'mauve'" in told[0]
        assert "did you mean new?" in told[1]
        assert "is for typing" in told[2]
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: screen.answers(app) == ["Hello there."] and ready(app))
    assert (tmp_path / "config.toml").read_text() == text


async def test_a_bad_file_is_told_and_never_written(tmp_path: Path) -> None:
    app = app_for(FakeLoader(WatchedModel()), config=config(tmp_path, "theme = "))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
        assert "is not TOML" in screen.notices(app, "error")[0]
        await pilot.press("f3")
        await until(pilot, lambda: panel(app).is_open and len(screen.notices(app, "error")) > 1)
        assert "Not remembered" in screen.notices(app, "error")[1]
    assert (tmp_path / "config.toml").read_text() == "theme = "


async def test_settings_change_the_conversation(tmp_path: Path) -> None:
    model = WatchedModel()
    app = app_for(FakeLoader(model), config=tmp_path)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
        await screen.say(pilot, "/settings")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        await pilot.press("down", "down", "down", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press(*"0.7", "enter")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, SettingsScreen))
        assert model.last_chat.options == {"temperature": 0.7}


async def test_presets_by_command(tmp_path: Path) -> None:
    (tmp_path / "presets.toml").write_text('[Review]\nsystem = "You review."\nseed = 3\n')
    model = WatchedModel()
    app = app_for(FakeLoader(model), config=tmp_path)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
        await screen.say(pilot, "/preset")
        assert "Review: seed 3, “You review.”" in screen.notices(app)[-1]
        await screen.say(pilot, "/preset review")
        assert model.last_chat.options == {"seed": 3}
        assert model.last_chat.system == "You review."
        await screen.say(pilot, "/preset nothing")
        assert "there: Review" in screen.notices(app, "error")[-1]


async def test_without_a_folder_nothing_is_kept() -> None:
    app = app_for(FakeLoader(WatchedModel()))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
        await pilot.press("f3")
        app.remember(theme="nord")
        await pilot.pause()
        assert screen.notices(app, "error") == []


async def test_a_resize_moves_the_panel() -> None:
    app = app_for(FakeLoader(WatchedModel()))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: ready(app))
        await pilot.press("f3")
        await until(pilot, lambda: panel(app).region.x > 0)
        await pilot.resize_terminal(60, 24)
        await until(pilot, lambda: panel(app).region.x == 0)
        assert panel(app).region.height < 10
        assert screen.composer(app).region.width > 50
