"""Preferences, presets and keys: read, checked, changed, and never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import OptionError, StorageError
from localrt.common.settings import Settings
from localrt.hub.names import expand_alias, write_alias
from localrt.mcp.config import read_servers
from localrt.tui.keys import chosen_keys, read_key
from localrt.tui.preferences import PreferencesFile, Preset, PresetsFile
from tests.conftest import needs_links
from tests.mcp.test_config import GOOD as SERVERS
from tests.mutations import is_line

DEFAULTS = {"new": "ctrl+n", "conversations": "ctrl+o", "mark": "alt+up,ctrl+up"}
SWAPPED = {"new": "ctrl+o", "conversations": "ctrl+n"}


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
    assert any("did you mean theme?" in note for note in file.notes)
    assert any("temperatur" in note for note in file.notes)
    assert any("top_p" in note for note in file.notes)


@pytest.mark.parametrize(
    "text",
    ["theme = ", "\x00", "a = 1\na = 2", f"a = {'9' * 5000}", "a = " + "[" * 9999],
    ids=["no value", "a byte", "twice", "many digits", "deep"],
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
    assert list(tmp_path.iterdir()) == [file.path]  # nothing half-written beside it


def test_a_file_of_windows(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbfpanel = true\r\n# mine\r\n")
    file = PreferencesFile(tmp_path)
    assert file.load().panel
    file.change({"theme": "nord"})
    assert "# mine" in (tmp_path / "config.toml").read_text("utf-8")
    assert (file.load().panel, file.load().theme, file.notes) == (True, "nord", ())


@needs_links
def test_settings_that_are_a_link(tmp_path: Path) -> None:
    """As of people who keep their settings in a repository."""
    (tmp_path / "mine").mkdir()
    mine = config(tmp_path / "mine", 'theme = "nord"\n').path
    (tmp_path / "config.toml").symlink_to(mine)
    PreferencesFile(tmp_path).change({"panel": True})
    assert (tmp_path / "config.toml").is_symlink()
    assert mine.read_text("utf-8") == 'theme = "nord"\npanel = true\n'


# -- presets ---------------------------------------------------------------------------------------


def test_presets(tmp_path: Path) -> None:
    presets = PresetsFile(tmp_path)
    assert presets.list() == []
    presets.save(Preset("Review", "You review code.\nBe brief.", {"temperature": 0.2}))
    presets.save(Preset("Ähnlich", None, {"seed": 3}))
    presets.save(Preset("Review", "Other.", {}))
    assert [preset.name for preset in presets.list()] == ["Review", "Ähnlich"]
    assert presets.find("review") == Preset("Review", "Other.", {})
    presets.replace_table("Review", None)
    assert [preset.name for preset in presets.list()] == ["Ähnlich"]
    with pytest.raises(OptionError, match="available: Ähnlich"):
        presets.find("Review")


def test_multiline_preset(tmp_path: Path) -> None:
    presets = PresetsFile(tmp_path)
    presets.save(Preset("Review", 'Be "brief".\nSay \\ why.', {"temperature": 0.2}))
    assert '"""' in presets.path.read_text("utf-8")
    assert presets.find("Review").system == 'Be "brief".\nSay \\ why.'
    presets.save(Preset("Windows", "Be brief.\r\nBe kind."))
    assert presets.find("Windows").system == "Be brief.\r\nBe kind."


def test_bad_presets(tmp_path: Path) -> None:
    (tmp_path / "presets.toml").write_text("good = {seed = 1}\nbad = {sed = 1}\nworse = 3\n")
    presets = PresetsFile(tmp_path)
    assert [preset.name for preset in presets.list()] == ["good"]
    assert len(presets.notes) == 2
    presets.save(Preset("new", "x"))
    assert "bad" in presets.path.read_text("utf-8")  # somebody's work


@pytest.mark.parametrize(
    "preset",
    [
        Preset("", "x"),
        Preset("a" * 80, "x"),
        Preset("a\nb", "x"),
        Preset("x"),
        Preset("x", "", {"k": 1}),
    ],
)
def test_unsavable_presets(tmp_path: Path, preset: Preset) -> None:
    with pytest.raises(OptionError):
        PresetsFile(tmp_path).save(preset)
    assert not (tmp_path / "presets.toml").exists()


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("Ctrl+L", "ctrl+l"),
        ("alt + PgUp", "alt+pageup"),
        ("F6", "f6"),
        ("Esc", "escape"),
        ("shift+ctrl+x", "ctrl+shift+x"),
        ("?", "?"),
        ("ctrl+", None),
        ("foo+l", None),
        ("f99", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_read_key(said: str, key: str | None) -> None:
    assert read_key(said) == key


@pytest.mark.parametrize(
    ("chosen", "keymap"),
    [
        ({"new": "Ctrl+L, F6", "mark": ["alt+k"]}, {"new": "ctrl+l,f6", "mark": "alt+k"}),
        (
            {"new": "ctrl+o", "conversations": "ctrl+n"},
            {"new": "ctrl+o", "conversations": "ctrl+n"},
        ),
    ],
)
def test_chosen_keys(chosen: dict[str, Any], keymap: dict[str, str]) -> None:
    assert chosen_keys(chosen, DEFAULTS) == (keymap, [])


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"nwe": "ctrl+l"}, "did you mean new?"),
        ({"xyz": "ctrl+l"}, "available: new, conversations, mark"),
        ({"new": "ctrl+nonsense"}, "is not a key"),
        ({"new": "x"}, "for typing"),
        ({"new": "ctrl+q"}, "cannot be reassigned"),
        ({"new": 3}, "is not a key"),
        ({"new": []}, "is not a key"),
        ({"new": "ctrl+o"}, "ctrl+o belongs to conversations: new keeps ctrl+n"),
    ],
)
def test_refused_keys(chosen: dict[str, Any], said: str) -> None:
    keymap, notes = chosen_keys(chosen, DEFAULTS)
    assert keymap == {}
    (note,) = notes
    assert said in note


@given(
    st.dictionaries(
        st.sampled_from([*DEFAULTS, "other"]),
        st.lists(
            st.sampled_from(["ctrl+n", "ctrl+o", "alt+up", "ctrl+up", "f6", "x", "bad"]), max_size=3
        ),
    )
)
def test_keys_unique(chosen: dict[str, Any]) -> None:
    keymap, _ = chosen_keys(chosen, DEFAULTS)
    keys: dict[str, str] = {}
    for action, default in DEFAULTS.items():
        for key in keymap.get(action, default).split(","):
            assert keys.setdefault(key, action) == action
