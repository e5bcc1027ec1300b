"""What the user prefers: theme, keys, the open panel, options and system prompt of new chats.

Read at the start from ``config.toml`` in the config folder, whose notation is TOML:

    theme = "localrt-dark"
    panel = true
    system = "Answer briefly."

    [generation]
    temperature = 0.2

    [keys]
    new = "ctrl+l"

What cannot be used is told once and its default kept; the file stays as it is. Knows no widget.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrt.errors import LocalrtError, OptionError, StorageError
from localrt.tui.text import one_line
from localrt.tui.toml_file import MemoryFile, TomlFile

__all__ = ["Preferences", "PreferencesFile", "check_options", "config_folder"]

_NAMES = ("generation", "keys", "panel", "system", "theme")
_FILE = "config.toml"


def config_folder() -> Path:
    """Where preferences and presets lie."""
    import localrt

    return localrt.Settings.from_environment().config_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """``keys`` are a config file's words, yet to be checked; None: nothing was said."""

    theme: str | None = None
    panel: bool = False
    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)


class PreferencesFile:
    """In ``folder``, or with None nowhere.

    ``notes`` are lines that the user should see once ``load`` has read the file.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = MemoryFile() if folder is None else TomlFile(folder / _FILE)
        self.notes: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._file.path

    def load(self) -> Preferences:
        """What it says, as far as it can be used."""
        self.notes = ()
        try:
            values = self._file.read()
        except StorageError as error:
            self._note(f"{one_line(error)}: defaults are used, the file stays as it is")
            return Preferences()
        for name in values.keys() - set(_NAMES):
            self._note(f"{_FILE}: {name!r} is not a setting{_meant(name, _NAMES)}: left out")
        return Preferences(
            theme=self._typed(values, "theme", str, None),
            panel=self._typed(values, "panel", bool, False),
            system=self._typed(values, "system", str, None),
            options=self._options(self._typed(values, "generation", dict, {})),
            keys=self._typed(values, "keys", dict, {}),
        )

    def remember(self, **values: Any) -> None:
        """Change ``theme``, ``panel`` or ``system``; None forgets one.

        Raises:
            StorageError: the file cannot be read or written.
        """
        self._file.change(values)

    def remember_options(self, options: Mapping[str, Any]) -> None:
        """These options, and no others, are those of new chats.

        Raises:
            StorageError: the file cannot be read or written.
        """
        self._file.replace_table("generation", options or None)

    def _note(self, line: str) -> None:
        self.notes += (line,)

    def _typed(self, values: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
        value = values.get(name, default)
        if value is default or isinstance(value, kind):
            return value
        words = {str: "a text", bool: "true or false", dict: "a table"}
        self._note(f"{_FILE}: {name} must be {words[kind]}, is {value!r}: left out")
        return default

    def _options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        good: dict[str, Any] = {}
        for name, value in values.items():
            try:
                check_options({name: value})
            except LocalrtError as error:
                self._note(f"{_FILE}, [generation]: {one_line(error)}: left out")
            else:
                good[name] = value
        return good


def check_options(options: Mapping[str, Any]) -> None:
    """Whether a generation would take these.

    Raises:
        OptionError: an unknown name or an impossible value.
    """
    from localrt.engine.options import read_options

    read_options(options)
    if "logprobs" in options:
        raise OptionError("logprobs is not an option of a chat")


def _meant(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
