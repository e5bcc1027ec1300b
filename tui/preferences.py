"""The user's preferences, in two TOML files of the config folder. Users may edit them.

``config.toml`` has theme, keys, the open panel, options and system prompt of new chats:

    theme = "localrt-dark"
    panel = true
    system = "Answer briefly."
    embedding_model = "BAAI/bge-m3"

    [generation]
    temperature = 0.2

    [keys]
    new = "ctrl+l"

    [models]
    fast = "llama3.2:1b"

    [mcp.servers.files]
    command = "npx"

``presets.toml`` has named presets of system prompt and options:

    ["Code review"]
    system = "You review code. Be brief."
    temperature = 0.2

Unusable entries are reported once and ignored; the files stay as they are. Knows no widget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrt.common.errors import LocalrtError, OptionError, StorageError
from localrt.common.option_names import did_you_mean
from localrt.common.toml_file import TomlFile
from localrt.tui.text import one_line

# models is read by hub/aliases.py, mcp by localrt/mcp.
_NAMES = ("embedding_model", "generation", "keys", "mcp", "models", "panel", "system", "theme")
_FILE = "config.toml"
_PRESETS_FILE = "presets.toml"
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """``keys`` is the unchecked text of the config file; None means not set."""

    theme: str | None = None
    panel: bool = False
    system: str | None = None
    embedding_model: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, object] = field(default_factory=dict)


class PreferencesFile(TomlFile):
    """The file in ``folder``; None keeps nothing.

    ``notes`` are lines for the user about what ``load`` ignored.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(None if folder is None else folder / _FILE)
        self.notes: tuple[str, ...] = ()

    def load(self) -> Preferences:
        """The preferences; unusable entries are reported in ``notes``."""
        self.notes = ()
        try:
            values = self.read()
        except StorageError as error:
            self._note(f"{one_line(error)}: defaults are used, the file stays as it is")
            return Preferences()
        for name in values.keys() - set(_NAMES):
            hint = did_you_mean(name, _NAMES) or "it is ignored"
            self._note(f"{_FILE}: {name!r} is not a setting: {hint}")
        return Preferences(
            theme=self._typed(values, "theme", str, None),
            panel=self._typed(values, "panel", bool, False),
            system=self._typed(values, "system", str, None),
            embedding_model=self._typed(values, "embedding_model", str, None),
            options=self._options(self._typed(values, "generation", dict, {})),
            keys=self._typed(values, "keys", dict, {}),
        )

    def remember_options(self, options: Mapping[str, object]) -> None:
        """Save exactly these options for new chats.

        Raises:
            OptionError: an option is invalid.
            StorageError: the file cannot be read or written.
        """
        _check_options(options)
        self.replace_table("generation", options or None)

    def _note(self, line: str) -> None:
        self.notes += (line,)

    def _typed(self, values: Mapping[str, object], name: str, kind: type, default: object) -> Any:
        value = values.get(name, default)
        if value is default or isinstance(value, kind):
            return value
        words = {str: "text", bool: "true or false", dict: "a table"}
        self._note(f"{_FILE}: {name} must be {words[kind]}, is {value!r}: it is ignored")
        return default

    def _options(self, values: Mapping[str, object]) -> dict[str, object]:
        good: dict[str, object] = {}
        for name, value in values.items():
            try:
                _check_options({name: value})
            except LocalrtError as error:
                self._note(f"{_FILE}, [generation]: {one_line(error)}: it is ignored")
            else:
                good[name] = value
        return good


@dataclass(frozen=True, slots=True)
class Preset:
    """With ``system`` None the conversation keeps its own; ``options`` replace all options."""

    name: str
    system: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """``temperature 0.2, “You review code. …”``."""
        parts = [f"{name} {value}" for name, value in self.options.items()]
        if self.system:
            first = " ".join(self.system.split())
            parts.append(f"“{first if len(first) <= 40 else first[:39] + '…'}”")
        return ", ".join(parts) or "the model's defaults"


class PresetsFile(TomlFile):
    """The file in ``folder``; None keeps nothing.

    ``notes`` are lines for the user about what the last ``list`` left out.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(None if folder is None else folder / _PRESETS_FILE)
        self.notes: tuple[str, ...] = ()

    def list(self) -> list[Preset]:
        """The valid presets, sorted by name."""
        self.notes = ()
        try:
            values = self.read()
        except StorageError as error:
            self.notes = (f"{one_line(error)}: the file stays as it is",)
            return []
        presets = []
        for name, entry in values.items():
            try:
                presets.append(_preset(name, entry))
            except LocalrtError as error:
                self.notes += (f"{_PRESETS_FILE}, {name}: {one_line(error)}: it is ignored",)
        return sorted(presets, key=lambda preset: preset.name.lower())

    def find(self, name: str) -> Preset:
        """The preset of this name, ignoring case.

        Raises:
            OptionError: there is none.
        """
        presets = self.list()
        for preset in presets:
            if preset.name.lower() == name.strip().lower():
                return preset
        there = ", ".join(preset.name for preset in presets) or "none yet"
        raise OptionError(f"no preset {name!r} (available: {there})")

    def save(self, preset: Preset) -> None:
        """Save a preset; it replaces one of the same name.

        Raises:
            OptionError: the name or an option is invalid.
            StorageError: the file cannot be read or written.
        """
        name = preset.name.strip()
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise OptionError(f"a preset's name has 1 to {_LONGEST_NAME} characters")
        _check_options(preset.options)
        system = {} if preset.system is None else {"system": preset.system}
        if not system and not preset.options:
            raise OptionError("there is nothing to save: set an option or a system prompt first")
        self.replace_table(name, {**system, **preset.options})


def _check_options(options: Mapping[str, object]) -> None:
    from localrt.engine.options import read_options  # slow to import

    read_options(options)
    if "logprobs" in options:
        raise OptionError("logprobs is not an option of a chat")


def _preset(name: str, entry: object) -> Preset:
    if not isinstance(entry, dict):
        raise OptionError("it must be a table")
    options = {key: value for key, value in entry.items() if key != "system"}
    system = entry.get("system")
    if system is not None and not isinstance(system, str):
        raise OptionError("system must be a text")
    _check_options(options)
    return Preset(name, system, options)
