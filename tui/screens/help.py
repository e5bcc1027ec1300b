"""The help screen: every command and key on one page that scrolls.

Knows the tables of commands and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localrt.tui.commands import COMMANDS
from localrt.tui.keys import KEYS, OTHER_KEYS, Key
from localrt.tui.screens.dialogs import HEADING, Dialog

__all__ = ["HelpScreen", "help_page"]

_WIDTH = 16


class HelpScreen(Dialog[None]):
    """Commands and keys; Esc, q or F1 closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,f1,enter", "leave", show=False, priority=True)
    ]

    def __init__(self, keys: Sequence[Key] = KEYS) -> None:
        super().__init__(VerticalScroll(Static(help_page(keys))), keys="Esc closes", tall=True)


def help_page(known: Sequence[Key] = KEYS) -> Content:
    """Commands and keys under their headings: what to type, what it does."""
    commands = [(entry.usage, entry.does) for entry in COMMANDS]
    commands.append(("@PATH", "in a message: attach that file"))
    commands.append(("//TEXT", "send text that begins with a slash"))
    keys = [*OTHER_KEYS, *((key.shown, key.does) for key in known)]
    parts: list[tuple[str, str]] = []
    for heading, rows in (("Commands", commands), ("Keys", keys)):
        parts.append((f"{heading}\n", HEADING))
        for left, right in rows:
            parts += [(f"{left:<{_WIDTH}} ", "$text-accent"), (f"{right}\n", "$foreground")]
        parts.append(("\n", ""))
    return Content.assemble(*parts).rstrip()
