"""The keys as data: their actions, their help, and the user's own key choices.

One table makes the bindings, the command palette and the help screen. Every action has an ``id``,
by which a config file and ``App.set_keymap`` rebind it. In a config file keys are written as people
say them (``"Ctrl+L"``, ``"alt+left"``, ``"F6"``), several with commas. Knows no widget.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from textual.binding import Binding
from textual.keys import Keys

from localrt.common.option_names import did_you_mean


@dataclass(frozen=True, slots=True)
class Key:
    """``keys`` as Textual names them, separated by commas; the first is the one that help shows.

    ``palette``: the command palette offers it. ``first``: it works whatever has the focus;
    ``everywhere``: also in every window.
    """

    id: str
    keys: str
    action: str
    does: str
    palette: bool = True
    first: bool = False
    everywhere: bool = False

    @property
    def label(self) -> str:
        """``"Ctrl+O"``."""
        names = self.keys.split(",")[0].split("+")
        return "+".join(_NAMES.get(name, name.capitalize()) for name in names)


_NAMES = {"escape": "Esc", "pageup": "PgUp", "pagedown": "PgDn"}

# As in other terminal programs. Windows cannot suspend; this key undoes there.
_SUSPEND = Key(
    *("suspend", "ctrl+z", "app.suspend_process", "Suspend; fg in the shell resumes"),
    palette=False,
    first=True,
    everywhere=True,
)
KEYS = (
    Key("conversations", "ctrl+o", "conversations", "List, search and open conversations"),
    Key("find", "ctrl+f", "find", "Find in this conversation", first=True),
    Key("new", "ctrl+n", "new", "New conversation"),
    Key("rename", "f2", "rename", "Rename this conversation"),
    Key("mark-previous", "alt+up,ctrl+up", "mark(-1)", "Mark the turn above", palette=False),
    Key("mark-next", "alt+down,ctrl+down", "mark(1)", "Mark the turn below", palette=False),
    Key("temporary", "alt+n", "temporary", "New conversation that is never on the disk"),
    Key("edit", "alt+e", "edit", "Edit the marked answer, or the last message and send it again"),
    Key("continue", "alt+g", "command('continue')", "Go on with an answer that was cut"),
    Key("retry", "ctrl+r,alt+r", "retry", "Answer again; the previous answer stays as a branch"),
    Key("branch-previous", "alt+left", "branch('prev')", "Previous branch (2/3 becomes 1/3)"),
    Key("branch-next", "alt+right", "branch", "Next branch"),
    Key("copy", "alt+c", "copy", "Copy the marked or last answer"),
    Key("copy-code", "alt+y", "copy('code')", "Copy the last code block; again: the one before it"),
    Key("fold", "ctrl+t,alt+t", "fold", "Show or hide thinking, pasted text and tool results"),
    Key("editor", "ctrl+g", "editor", "Write in $VISUAL or $EDITOR (also Ctrl+X Ctrl+E)"),
    Key("export", "alt+x", "command('export')", "Export the conversation as Markdown"),
    Key("saved", "ctrl+s", "saved", "Say where the conversation is saved", palette=False),
    Key("panel", "f3,ctrl+l", "panel", "Show or hide the live panel: memory, disk, speed"),
    Key("models", "f4", "app.models", "List, search, download, delete and load models"),
    Key("settings", "f5", "app.settings", "Options, presets, theme and keys"),
    Key("help", "f1", "app.help", "Help", first=True),
    Key("stop", "escape", "stop", "Stop the answer; unmark", palette=False),
    Key(
        "interrupt",
        "ctrl+c",
        "interrupt",
        "Copy the selection, stop the answer or clear the text; twice quits",
        False,
        True,
    ),
    *((_SUSPEND,) if hasattr(signal, "SIGTSTP") else ()),
)

OTHER_KEYS = (
    ("Enter", "Send; while the model is busy the message waits; on a marked turn: its menu"),
    ("Ctrl+J", "New line (also Shift+Enter)"),
    ("Up, Down", "Earlier and later messages"),
    ("Tab", "Complete a command; unfold a pasted text"),
    ("Alt+Z, Ctrl+Y", "Undo, redo (also Ctrl+_)"),
    ("PgUp, PgDn", "Scroll; Ctrl+Home, Ctrl+End"),
    ("Mouse", "Click marks a turn, dragging selects text"),
    ("Ctrl+P", "Palette of all commands"),
    ("Ctrl+Q", "Quit"),
)

_ALIASES = {
    "esc": "escape",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "pgdown": "pagedown",
    "del": "delete",
    "ins": "insert",
    "return": "enter",
}
_MODIFIERS = ("ctrl", "alt", "shift", "super", "meta", "hyper")
_NAMED = {key.value for key in Keys} | {"space", "enter", "tab"}
_FUNCTION = re.compile(r"f([1-9]|1\d|2[0-4])")
# The app would not work if these were rebound.
_MOVING = ("up", "down", "left", "right", "home", "end")
_TYPING = ("enter", "tab", "backspace", "delete", "space")
_TAKEN = frozenset((*_MOVING, *_TYPING, "ctrl+q", "ctrl+p", "ctrl+j"))


def bindings(*, everywhere: bool = False) -> list[Binding]:
    """The table as Textual's bindings: the chat's keys, or those of every window."""
    return [
        Binding(key.keys, key.action, key.does, show=False, priority=key.first, id=key.id)
        for key in KEYS
        if key.everywhere is everywhere
    ]


def rebound(keymap: Mapping[str, str]) -> tuple[Key, ...]:
    """The table with the keys that the user chose, by id."""
    return tuple(replace(key, keys=keymap.get(key.id, key.keys)) for key in KEYS)


def read_key(text: str) -> str | None:
    """The key as Textual names it; None if there is no such key."""
    *modifiers, name = [part.strip().lower() for part in text.strip().split("+")]
    name = _ALIASES.get(name, name)
    if any(each not in _MODIFIERS for each in modifiers):
        return None
    known = name in _NAMED or _FUNCTION.fullmatch(name) or (len(name) == 1 and name.isprintable())
    if not known or name == " ":
        return None
    return "+".join([*(m for m in _MODIFIERS if m in modifiers), name])


def chosen_keys(
    choices: Mapping[str, object], defaults: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The keymap, and a line for each choice that cannot be used.

    ``defaults`` are the keys of all actions by id. An action whose choice is refused keeps its
    default.
    """
    keymap: dict[str, str] = {}
    notes: list[str] = []
    for action, words in choices.items():
        if action not in defaults:
            hint = did_you_mean(action, defaults) or f"available: {', '.join(defaults)}"
            notes.append(f"[keys]: no action {action!r} ({hint})")
            continue
        keys, problem = _read(words)
        if problem:
            notes.append(f"[keys]: {action}: {problem}; it keeps {defaults[action]}")
        else:
            keymap[action] = ",".join(keys)
    while clash := _clash(keymap, defaults):
        loser, winner, key = clash
        notes.append(f"[keys]: {key} belongs to {winner}: {loser} keeps {defaults[loser]}")
        del keymap[loser]
    return keymap, notes


def _read(words: object) -> tuple[list[str], str]:
    """The keys and an error message; one of them is empty."""
    listed = words if isinstance(words, list) else str(words).split(",")
    if not isinstance(words, str | list) or not listed:
        return [], f"{words!r} is not a key"
    keys = []
    for word in listed:
        key = read_key(word) if isinstance(word, str) else None
        if key is None:
            return [], f"{word!r} is not a key: write it like ctrl+l, alt+left or f6"
        if key in _TAKEN:
            return [], f"{key} cannot be reassigned"
        if len(key.rpartition("+")[2]) == 1 and not set(key.split("+")[:-1]) & {"ctrl", "alt"}:
            return [], f"{key!r} is for typing: put ctrl or alt before it"
        keys.append(key)
    return keys, ""


def _clash(keymap: Mapping[str, str], defaults: Mapping[str, str]) -> tuple[str, str, str] | None:
    """One clash: (action keeping its default key, the key's owner, the key)."""
    owners: dict[str, str] = {}
    for action in [each for each in defaults if each not in keymap] + list(keymap):
        for key in keymap.get(action, defaults[action]).split(","):
            owner = owners.setdefault(key, action)
            if owner != action and action in keymap:
                return action, owner, key
    return None
