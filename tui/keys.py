"""The keys as data: what each does, its name for a config file, and how help shows it.

One table makes the bindings, the command palette and the help screen. Knows no widget. Every key
has an ``id``, by which ``App.set_keymap`` gives it another key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from textual.binding import Binding

__all__ = ["KEYS", "OTHER_KEYS", "Key", "bindings", "rebound"]


@dataclass(frozen=True, slots=True)
class Key:
    """``keys`` as Textual names them, separated by commas; the first is the one that help shows.

    ``palette``: the command palette offers it. ``first``: it works wherever the focus is.
    """

    id: str
    keys: str
    action: str
    does: str
    palette: bool = True
    first: bool = False

    @property
    def shown(self) -> str:
        """``"Ctrl+O"``."""
        names = self.keys.split(",")[0].split("+")
        return "+".join(_NAMES.get(name, name.capitalize()) for name in names)


_NAMES = {"escape": "Esc", "pageup": "PgUp", "pagedown": "PgDn"}

KEYS = (
    Key("conversations", "ctrl+o", "conversations", "List, search and open conversations"),
    Key("new", "ctrl+n", "new", "New conversation"),
    Key("rename", "f2", "rename", "Rename this conversation"),
    Key("mark-previous", "alt+up,ctrl+up", "mark(-1)", "Mark the turn above", palette=False),
    Key("mark-next", "alt+down,ctrl+down", "mark(1)", "Mark the turn below", palette=False),
    Key("edit", "alt+e", "turn('edit')", "Edit the marked or last message and send it again"),
    Key("retry", "ctrl+r,alt+r", "turn('retry')", "Answer again, beside the answer that is there"),
    Key("branch-previous", "alt+left", "turn('previous')", "Previous branch (2/3 becomes 1/3)"),
    Key("branch-next", "alt+right", "turn('next')", "Next branch"),
    Key("copy", "alt+c", "turn('copy')", "Copy the marked or last answer"),
    Key("copy-code", "alt+y", "turn('code')", "Copy its last code block; again: the one before"),
    Key("fold", "ctrl+t,alt+t", "turn('fold')", "Show or hide thinking and pasted text"),
    Key("editor", "ctrl+g", "editor", "Write in $VISUAL or $EDITOR (also Ctrl+X Ctrl+E)"),
    Key("export", "alt+x", "export", "Export the conversation as Markdown"),
    Key("panel", "f3,ctrl+l", "panel", "Show or hide the live panel: memory, disk, why not faster"),
    Key("models", "f4", "models", "List, search, download, delete and load models"),
    Key("settings", "f5", "settings", "Options, presets, theme and keys"),
    Key("help", "f1", "help", "Help", first=True),
    Key("stop", "escape", "stop", "Stop the answer; unmark", palette=False),
    Key("interrupt", "ctrl+c", "interrupt", "Copy the selection or stop; twice quits", False, True),
)

OTHER_KEYS = (
    ("Enter", "Send; while busy it waits in line; on a marked turn: what can be done"),
    ("Ctrl+J", "New line, as Shift+Enter"),
    ("Up, Down", "Earlier and later messages"),
    ("Tab", "Complete a command; unfold a pasted text"),
    ("PgUp, PgDn", "Scroll; Ctrl+Home, Ctrl+End"),
    ("Mouse", "Click marks a turn, dragging selects text"),
    ("Ctrl+P", "Palette of all commands"),
    ("Ctrl+Q", "Quit"),
)


def bindings() -> list[Binding]:
    """The table as Textual takes it."""
    return [
        Binding(key.keys, key.action, key.does, show=False, priority=key.first, id=key.id)
        for key in KEYS
    ]


def rebound(keymap: Mapping[str, str]) -> tuple[Key, ...]:
    """The table with the keys that the user chose, by id."""
    return tuple(replace(key, keys=keymap.get(key.id, key.keys)) for key in KEYS)
