"""Settings: the screen, preferences, presets and keys; read, checked, changed, and never lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static, TextArea

from localrt.common.errors import OptionError, StorageError
from localrt.common.files import locked
from localrt.common.settings import Settings
from localrt.common.toml_file import TomlFile
from localrt.engine.option_help import OPTION_HELP
from localrt.history.presets import Defaults, Preset, PresetsFile
from localrt.hub.names import expand_alias, write_alias
from localrt.mcp.config import read_servers
from localrt.tui import ChatApp
from localrt.tui.chat.panel import LivePanel
from localrt.tui.conversation.state import Session
from localrt.tui.keys import chosen_keys
from localrt.tui.preferences import PreferencesFile
from localrt.tui.screens.dialogs import Ask, HelpScreen
from localrt.tui.screens.settings import PickTheme, SettingsScreen
from localrt.tui.themes import offered
from tests.conftest import needs_links
from tests.mcp.test_config import GOOD as SERVERS
from tests.mutations import is_line
from tests.tui import screen
from tests.tui.conftest import running, until
from tests.tui.fakes import FakeModel

DEFAULTS = {"new": "ctrl+n", "conversations": "ctrl+o", "mark": "alt+up,ctrl+up"}


def config(folder: Path, text: str) -> PreferencesFile:
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return PreferencesFile(folder)


def write_all(folder: Path) -> None:
    """A config with everything, and presets."""
    more = '[generation]\ntemperature = 0.2\n[keys]\nnew = "ctrl+l"\n[models]\nfast = "a:1b"\n'
    own = settings_of(folder).config_dir
    own.mkdir()
    (own / "config.toml").write_text(f'system = "Be\\nbrief."\npanel = true{SERVERS}{more}')
    (own / "presets.toml").write_text('["Code review"]\nsystem = "Review."\ntemperature = 0.2\n')


def settings_of(folder: Path) -> Settings:
    return Settings.from_environment({"XDG_CONFIG_HOME": str(folder), "HOME": str(folder)})


def read_all(folder: Path) -> None:
    """Everything that reads those files, and changes them."""
    about = settings_of(folder)
    own, presets = PreferencesFile(about.config_dir), PresetsFile(about.config_dir)
    found = own.load()
    _, notes = read_servers(about.config_dir, {"MY_TOKEN": "s3cret"})
    _, more = chosen_keys(found.keys, DEFAULTS)
    listed = presets.list()
    assert all(map(is_line, (*notes, *more, *own.notes)))
    expand_alias("fast", about)
    for preset in listed:
        presets.save(presets.find(preset.name))
    write_alias("new", "fast", about)
    own.remember_options(found.options)


# -- preferences -----------------------------------------------------------------------------------


def test_bad_values(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        'them = "nord"\npanel = 3\ntheme = "nord"\n'
        "[generation]\ntemperatur = 1\ntop_p = 7\nseed = 3",
    )
    found = file.load()
    assert (found.theme, found.panel, dict(found.options)) == ("nord", False, {"seed": 3})
    assert len(file.notes) == 4
    for words in ("did you mean theme?", "temperatur", "top_p"):
        assert any(words in note for note in file.notes)


@pytest.mark.parametrize(
    "text",
    ["theme = ", f"a = {'9' * 5000}", "a = " + "[" * 9999],
    ids=["no value", "many digits", "deep"],
)
def test_bad_file(tmp_path: Path, text: str) -> None:
    file = config(tmp_path, text)
    assert file.load().theme is None
    assert len(file.notes) == 1
    assert "is not TOML" in file.notes[0]
    with pytest.raises(StorageError, match="is not TOML"):
        file.change({"theme": "nord"})
    assert file.path.read_text("utf-8") == text


def test_changes_keep_comments(tmp_path: Path) -> None:
    file = config(tmp_path, '# mine\ntheme = "nord"  # blue\n\n[keys]\n# twice\nnew = "ctrl+l"\n')
    file.change({"theme": "localrt-light", "panel": True})
    file.remember_options({"temperature": 0.5})
    text = file.path.read_text("utf-8")
    for part in ("# mine", "# blue", "# twice", 'new = "ctrl+l"', 'theme = "localrt-light"'):
        assert part in text
    assert file.load().panel
    assert dict(file.load().options) == {"temperature": 0.5}
    file.remember_options({})
    file.change({"panel": None})
    assert dict(file.load().options) == {}
    assert "generation" not in file.path.read_text("utf-8")
    lock = "config.toml.lock"  # which some systems keep
    assert {each.name for each in tmp_path.iterdir()} - {lock} == {"config.toml"}


CHANGES = {
    "preferences.change({name: number})": ("config.toml", None),
    "preferences.change({name: 'ctrl+l'}, table='keys')": ("config.toml", "keys"),
    "preferences.replace_table(name, {'seed': number})": ("config.toml", None),
    "presets.save(Preset(name, 'Be brief.'))": ("presets.toml", None),
    "write_alias(name, 'a:1b', settings)": ("config.toml", "models"),
    "write_alias('x' + name, 'a:1b', settings); write_alias(name, 'a:1b', settings); "
    "remove_alias('x' + name, settings)": ("config.toml", "models"),
}
CHANGING = """
import sys
from pathlib import Path
from localrt.common import toml_file
from localrt.common.settings import Settings
from localrt.history.presets import Preset, PresetsFile
from localrt.hub.names import remove_alias, write_alias
from localrt.tui.preferences import PreferencesFile

toml_file._WAIT_S = 600.0
for row, change in enumerate(sys.stdin):
    folder = str(Path(sys.argv[1], str(row)))
    settings = Settings.from_environment({"XDG_CONFIG_HOME": folder, "HOME": folder})
    preferences, presets = PreferencesFile(settings.config_dir), PresetsFile(settings.config_dir)
    for number in range(15):
        name = f"{sys.argv[2]}-{number}"
        exec(change)
    print("done", flush=True)
"""


@pytest.mark.slow
def test_changes_by_several_processes_at_once(tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        command = [sys.executable, "-c", CHANGING, str(tmp_path)]
        processes = [
            stack.enter_context(subprocess.Popen([*command, f"p{n}"], **pipes)) for n in range(8)
        ]
        for row, (change, (name, table)) in enumerate(CHANGES.items()):
            for process in processes:
                print(change, file=process.stdin, flush=True)
            assert [process.stdout.readline() for process in processes] == ["done\n"] * 8
            kept = TomlFile(settings_of(tmp_path / str(row)).config_dir / name).read()
            assert len(kept if table is None else kept[table]) == 8 * 15, change


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda own: own.touch(), "localrt cannot be written"),
        (lambda own: (own / "config.toml.lock").mkdir(parents=True), "lock cannot be written"),
        (lambda own: (own / "config.toml").mkdir(parents=True), "config.toml cannot be read"),
    ],
)
def test_settings_that_cannot_be_changed(
    spoil: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    """One line names the path, once."""
    spoil(tmp_path / "localrt")
    with pytest.raises(StorageError, match=said) as raised:
        PreferencesFile(tmp_path / "localrt").change({"panel": True})
    assert is_line(str(raised.value))
    assert str(raised.value).count(str(tmp_path)) == 1


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened(path, flags, *mode, **options)

    file = config(tmp_path, "panel = true\n")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError) as raised:
        file.change({"panel": None})
    assert str(raised.value) == f"{file.path}.lock cannot be written: {os.strerror(errno.EROFS)}"
    assert file.load().panel


def test_settings_that_another_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(tmp_path, "")
    monkeypatch.setattr("localrt.common.toml_file._WAIT_S", 0.1)
    with locked(file.path, 0.0), pytest.raises(StorageError) as raised:
        file.change({"panel": True})
    assert str(raised.value) == f"{file.path} is in use by another process: try again"
    file.change({"panel": True})
    assert file.load().panel


@needs_links
def test_settings_that_are_a_link(tmp_path: Path) -> None:
    """As of people who keep their settings in a repository."""
    (tmp_path / "mine").mkdir()
    mine = config(tmp_path / "mine", 'theme = "nord"\n').path
    (tmp_path / "config.toml").symlink_to(mine)
    PreferencesFile(tmp_path).change({"panel": True})
    assert (tmp_path / "config.toml").is_symlink()
    assert mine.read_text("utf-8") == 'theme = "nord"\npanel = true\n'


def test_presets(tmp_path: Path) -> None:
    presets = PresetsFile(tmp_path)
    assert presets.list() == []
    presets.save(Preset("Review", "You review code.\nBe brief.", {"temperature": 0.2}))
    presets.save(Preset("Ähnlich", None, {"seed": 3}))
    presets.save(Preset("Review", 'Be "brief".\nSay \\ why.', {}))
    assert '"""' in presets.path.read_text("utf-8")
    assert [preset.name for preset in presets.list()] == ["Review", "Ähnlich"]
    assert presets.find("review") == Preset("Review", 'Be "brief".\nSay \\ why.', {})
    presets.replace_table("Review", None)
    assert [preset.name for preset in presets.list()] == ["Ähnlich"]
    with pytest.raises(OptionError, match="available: Ähnlich"):
        presets.find("Review")
    for bad in (Preset("a\nb", "x"), Preset("x", "", {"k": 1})):
        with pytest.raises(OptionError):
            presets.save(bad)
    presets.path.write_text("good = {seed = 1}\nbad = {sed = 1}\nworse = 3\n")
    presets = PresetsFile(tmp_path)
    assert [preset.name for preset in presets.list()] == ["good"]
    assert len(presets.notes) == 2
    presets.save(Preset("new", "x"))
    assert "bad" in presets.path.read_text("utf-8")  # somebody's work


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"nwe": "ctrl+l"}, "did you mean new?"),
        ({"new": "ctrl+nonsense"}, "is not a key"),
        ({"new": "x"}, "for typing"),
        ({"new": "ctrl+q"}, "cannot be reassigned"),
        ({"new": "ctrl+o"}, "ctrl+o belongs to conversations: new keeps ctrl+n"),
    ],
)
def test_refused_keys(chosen: dict[str, Any], said: str) -> None:
    keymap, notes = chosen_keys(chosen, DEFAULTS)
    assert keymap == {}
    (note,) = notes
    assert said in note


def test_chosen_keys() -> None:
    several = {"new": "Ctrl+L, F6", "mark": ["alt+k"]}
    assert chosen_keys(several, DEFAULTS) == ({"new": "ctrl+l,f6", "mark": "alt+k"}, [])
    swapped = {"new": "ctrl+o", "conversations": "ctrl+n"}
    assert chosen_keys(swapped, DEFAULTS) == (swapped, [])


# -- in the app ------------------------------------------------------------------------------------


async def test_preferences(tmp_path: Path) -> None:
    config(
        tmp_path,
        'theme = "localrt-light"\nsystem = "Be brief."\n[generation]\ntemperature = 0.3\n'
        'min_p = 0.1\n[keys]\npanel = "f9"\n',
    )
    (tmp_path / "presets.toml").write_text('[Review]\nsystem = "You review."\nseed = 3\n')
    model = FakeModel()
    model.adapters = ("style", "facts")
    given = {"temperature": 0.9}  # the command line counts more
    async with running(model, size=(100, 30), config=tmp_path, options=given) as (app, pilot):
        assert app.theme == "localrt-light"
        assert model.last_chat.system == "Be brief."
        assert model.last_chat.options == {"temperature": 0.9, "min_p": 0.1}
        panel = app.query_one(LivePanel)
        await pilot.press("f3")
        await pilot.pause()
        assert not panel.is_open
        await pilot.press("f9")
        await until(pilot, lambda: panel.is_open)
        assert "F9 hides" in str(panel.render())
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        page = "".join(str(each.render()) for each in app.screen.query(Static))
        assert "F9" in page
        await pilot.press("escape")

        await screen.say(pilot, "/preset")
        assert "Review: seed 3, “You review.”" in screen.notices(app)[-1]
        await screen.say(pilot, "/preset review")
        assert model.last_chat.options == {"seed": 3}
        assert model.last_chat.system == "You review."
        await screen.say(pilot, "/adapter")
        assert screen.notices(app)[-1].split() == ["style", "facts"]
        await screen.say(pilot, "/adapter facts")
        assert "+facts" in screen.notices(app)[-1]
        assert model.last_chat.options["adapter"] == "facts"
        await screen.say(pilot, "/adapter none")
        assert "+" not in screen.notices(app)[-1]


@asynccontextmanager
async def settings(folder: Path) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    """The app with its settings open."""
    async with running(FakeModel(), size=(100, 30), config=folder) as (app, pilot):
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


def problem(app: ChatApp) -> str:
    return str(app.screen.query_one("#problem", Static).render())


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


async def test_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with settings(tmp_path) as (app, pilot):
        for name in OPTION_HELP:
            assert row(app, name)
        assert "40 (default)" in row(app, "top_k")  # the library's own
        await choose(pilot, app, "temperature")
        assert isinstance(app.screen, Ask)
        await typed(pilot, "0.7")
        assert session(app).chat.options == {"temperature": 0.7}
        assert "0.7" in row(app, "temperature")
        assert "default" not in row(app, "temperature")
        await choose(pilot, app, "temperature", "delete")
        assert session(app).chat.options == {}

        # What is wrong is said where it was typed.
        await choose(pilot, app, "top_p")
        await typed(pilot, "7")
        assert isinstance(app.screen, Ask)  # asked again
        assert "top_p" in problem(app)
        assert session(app).chat.options == {}
        await pilot.press("escape")

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
        await choose(pilot, app, "Begin with defaults")
        assert app.state.defaults == Defaults()

        # The panel and the keys.
        await choose(pilot, app, "Live panel")
        assert app.chat.panel.is_open
        assert "Ctrl+N" in row(app, "New conversation  ")

        # A theme is shown before it is taken.
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
        assert offered(app)[:2] == ["localrt-dark", "localrt-light"]
        monkeypatch.setattr(type(app.console), "color_system", property(lambda self: "standard"))
        assert offered(app) == ["ansi-dark", "ansi-light"]
