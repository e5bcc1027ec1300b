"""Keys that the user chose, checked: from a config file's words to what ``App.set_keymap`` takes.

Keys are written as people say them (``"Ctrl+L"``, ``"alt+left"``, ``"F6"``), several with commas.
Knows actions by their ids, not what they do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from textual.keys import Keys

__all__ = ["chosen_keys", "read_key"]

_ALIASES = {
    "esc": "escape",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "pgdown": "pagedown",
    "del": "delete",
    "ins": "insert",
    "return": "enter",
    "space": "space",
}
_MODIFIERS = ("ctrl", "alt", "shift", "super", "meta", "hyper")
_NAMED = {key.value for key in Keys} | {"space", "enter", "tab"}
_FUNCTION = re.compile(r"f([1-9]|1\d|2[0-4])")
# The app would not work without these where they are.
_MOVING = ("up", "down", "left", "right", "home", "end")
_TYPING = ("enter", "tab", "backspace", "delete", "space")
_TAKEN = frozenset((*_MOVING, *_TYPING, "ctrl+q", "ctrl+p", "ctrl+j"))


def read_key(text: str) -> str | None:
    """The key as Textual names it; None where there is no such key."""
    *modifiers, name = [part.strip().lower() for part in text.strip().split("+")]
    name = _ALIASES.get(name, name)
    if any(each not in _MODIFIERS for each in modifiers):
        return None
    known = name in _NAMED or _FUNCTION.fullmatch(name) or (len(name) == 1 and name.isprintable())
    if not known or name == " ":
        return None
    return "+".join([*(m for m in _MODIFIERS if m in modifiers), name])


def chosen_keys(
    chosen: Mapping[str, Any], defaults: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The keymap, and a line for each choice that cannot be used.

    ``defaults`` are the keys of all actions by their ids. An action whose choice is refused keeps
    its own.
    """
    keymap: dict[str, str] = {}
    notes: list[str] = []
    for action, words in chosen.items():
        if action not in defaults:
            close = difflib.get_close_matches(action, defaults, n=1)
            meant = (
                f" (did you mean {close[0]}?)" if close else f" (there are {', '.join(defaults)})"
            )
            notes.append(f"[keys]: no action {action!r}{meant}")
            continue
        keys, problem = _read(words)
        if problem:
            notes.append(f"[keys]: {action}: {problem}; it keeps {defaults[action]}")
        else:
            keymap[action] = ",".join(keys)
    while clash := _clash(keymap, defaults):
        loser, winner, key = clash
        notes.append(f"[keys]: {key} is {winner}'s: {loser} keeps {defaults[loser]}")
        del keymap[loser]
    return keymap, notes


def _read(words: Any) -> tuple[list[str], str]:
    """The keys, or what is wrong with them."""
    listed = words if isinstance(words, list) else str(words).split(",")
    if not isinstance(words, str | list) or not listed:
        return [], f"{words!r} is not a key"
    keys = []
    for word in listed:
        key = read_key(word) if isinstance(word, str) else None
        if key is None:
            return [], f"{word!r} is not a key: write it like ctrl+l, alt+left or f6"
        if key in _TAKEN:
            return [], f"{key} cannot be given away"
        if len(key.rpartition("+")[2]) == 1 and not set(key.split("+")[:-1]) & {"ctrl", "alt"}:
            return [], f"{key!r} is for typing: put ctrl or alt before it"
        keys.append(key)
    return keys, ""


def _clash(keymap: Mapping[str, str], defaults: Mapping[str, str]) -> tuple[str, str, str] | None:
    """(the action that has to keep its own, whose key it is, the key) of one clash."""
    owners: dict[str, str] = {}
    for action in [each for each in defaults if each not in keymap] + list(keymap):
        for key in keymap.get(action, defaults[action]).split(","):
            owner = owners.setdefault(key, action)
            if owner != action and action in keymap:
                return action, owner, key
    return None
