"""The user's preferences, in ``config.toml`` of the config folder, which users may edit.

It has theme, keys, the open panel, options and system prompt of new chats:

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

Unusable entries are reported once and ignored; the file stays as it is. Knows no widget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localrt.common.errors import StorageError
from localrt.common.option_names import did_you_mean
from localrt.common.toml_file import TomlFile
from localrt.history.presets import CONFIG_FILE, check_options, defaults_of, typed, unreadable

# models is read by hub/aliases.py, mcp by localrt/mcp.
_NAMES = ("embedding_model", "generation", "keys", "mcp", "models", "panel", "system", "theme")


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
        super().__init__(None if folder is None else folder / CONFIG_FILE)
        self.notes: tuple[str, ...] = ()

    def load(self) -> Preferences:
        """The preferences; unusable entries are reported in ``notes``."""
        self.notes = ()
        try:
            values = self.read()
        except StorageError as error:
            self._note(unreadable(error))
            return Preferences()
        for name in values.keys() - set(_NAMES):
            hint = did_you_mean(name, _NAMES) or "it is ignored"
            self._note(f"{CONFIG_FILE}: {name!r} is not a setting: {hint}")
        chosen = defaults_of(values)
        self.notes += chosen.notes
        return Preferences(
            theme=typed(values, "theme", str, None, self._note),
            panel=typed(values, "panel", bool, False, self._note),
            system=chosen.system,
            embedding_model=typed(values, "embedding_model", str, None, self._note),
            options=chosen.options,
            keys=typed(values, "keys", dict, {}, self._note),
        )

    def remember_options(self, options: Mapping[str, object]) -> None:
        """Save exactly these options for new chats.

        Raises:
            OptionError: an option is invalid.
            StorageError: the file cannot be read or written.
        """
        check_options(options)
        self.replace_table("generation", options or None)

    def _note(self, line: str) -> None:
        self.notes += (line,)
