"""Presets: a system prompt and options under a name, in ``presets.toml`` of the config folder.

    ["Code review"]
    system = "You review code. Be brief."
    temperature = 0.2

People may write the file themselves. Knows no widget and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrt.errors import LocalrtError, OptionError, StorageError
from localrt.tui.preferences import check_options
from localrt.tui.text import one_line
from localrt.tui.toml_file import MemoryFile, TomlFile

__all__ = ["Preset", "Presets"]

_FILE = "presets.toml"
_LONGEST = 60


@dataclass(frozen=True, slots=True)
class Preset:
    """``system`` None: the conversation's own stays; ``options`` are exactly these."""

    name: str
    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """``temperature 0.2, “You review code. …”``."""
        parts = [f"{name} {value}" for name, value in self.options.items()]
        if self.system:
            first = " ".join(self.system.split())
            parts.append(f"“{first if len(first) <= 40 else first[:39] + '…'}”")
        return ", ".join(parts) or "the model's defaults"


class Presets:
    """In ``folder``, or with None nowhere.

    ``notes`` are lines that the user should see, about what the last ``list`` left out.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = MemoryFile() if folder is None else TomlFile(folder / _FILE)
        self.notes: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Where they are."""
        return self._file.path

    def list(self) -> list[Preset]:
        """Those that can be used, by name."""
        self.notes = ()
        try:
            values = self._file.read()
        except StorageError as error:
            self.notes = (f"{one_line(error)}: the file stays as it is",)
            return []
        found = []
        for name, entry in values.items():
            try:
                found.append(_preset(name, entry))
            except LocalrtError as error:
                self.notes += (f"{_FILE}, {name}: {one_line(error)}: left out",)
        return sorted(found, key=lambda preset: preset.name.lower())

    def find(self, name: str) -> Preset:
        """The one of this name, in any case.

        Raises:
            OptionError: there is none.
        """
        presets = self.list()
        for preset in presets:
            if preset.name.lower() == name.strip().lower():
                return preset
        there = ", ".join(preset.name for preset in presets) or "none yet"
        raise OptionError(f"no preset {name!r} (there: {there})")

    def save(self, preset: Preset) -> None:
        """Write it, in the place of one of the same name.

        Raises:
            OptionError: a name or an option that cannot be.
            StorageError: the file cannot be read or written.
        """
        name = preset.name.strip()
        if not name or len(name) > _LONGEST or not name.isprintable():
            raise OptionError(f"a preset's name has 1 to {_LONGEST} characters")
        check_options(preset.options)
        values = dict(preset.options)
        if preset.system is not None:
            values = {"system": preset.system, **values}
        if not values:
            raise OptionError("there is nothing to save: set an option or a system prompt first")
        self._file.replace_table(name, values)

    def delete(self, name: str) -> None:
        """Remove it.

        Raises:
            StorageError: the file cannot be read or written.
        """
        self._file.replace_table(name, None)


def _preset(name: str, entry: Any) -> Preset:
    if not isinstance(entry, dict):
        raise OptionError("it must be a table")
    options = {key: value for key, value in entry.items() if key != "system"}
    system = entry.get("system")
    if system is not None and not isinstance(system, str):
        raise OptionError("system must be a text")
    check_options(options)
    return Preset(name, system, options)
