"""Presets and defaults of new conversations: system prompts and options that the user keeps.

``presets.toml`` of the config folder has named presets:

    ["Code review"]
    system = "You review code. Be brief."
    temperature = 0.2

The defaults are ``system`` and the table ``generation`` of ``config.toml``. Unusable entries are
reported once and ignored; the files stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrt.common.errors import LocalrtError, OptionError, StorageError
from localrt.common.formatting import one_line
from localrt.common.toml_file import TomlFile

CONFIG_FILE = "config.toml"
_PRESETS_FILE = "presets.toml"
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Defaults:
    """What new conversations begin with. ``notes`` are lines for the user about what is ignored."""

    system: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_defaults(folder: Path) -> Defaults:
    """The defaults of ``config.toml`` in ``folder``; none if there is no such file."""
    try:
        return defaults_of(TomlFile(folder / CONFIG_FILE).read())
    except StorageError as error:
        return Defaults(notes=(unreadable(error),))


def unreadable(error: StorageError) -> str:
    """The line for the user about a ``config.toml`` that cannot be read."""
    return f"{one_line(error)}: defaults are used, the file stays as it is"


def defaults_of(values: Mapping[str, object]) -> Defaults:
    """The defaults in the content of ``config.toml``."""
    notes: list[str] = []
    options: dict[str, object] = {}
    for name, value in typed(values, "generation", dict, {}, notes.append).items():
        try:
            check_options({name: value})
        except LocalrtError as error:
            notes.append(f"{CONFIG_FILE}, [generation]: {one_line(error)}: it is ignored")
        else:
            options[name] = value
    return Defaults(typed(values, "system", str, None, notes.append), options, tuple(notes))


def typed(
    values: Mapping[str, object], name: str, kind: type, default: object, say: Callable[[str], None]
) -> Any:
    """A value of ``config.toml``; one of another kind is reported and ignored."""
    value = values.get(name, default)
    if value is default or isinstance(value, kind):
        return value
    words = {str: "text", bool: "true or false", dict: "a table"}
    say(f"{CONFIG_FILE}: {name} must be {words[kind]}, is {value!r}: it is ignored")
    return default


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
        check_options(preset.options)
        system = {} if preset.system is None else {"system": preset.system}
        if not system and not preset.options:
            raise OptionError("there is nothing to save: set an option or a system prompt first")
        self.replace_table(name, {**system, **preset.options})


def check_options(options: Mapping[str, object]) -> None:
    """Raise an error unless new conversations can have these options."""
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
    check_options(options)
    return Preset(name, system, options)
