"""The help screen: every command and key on one page that scrolls.

Knows the tables of commands and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.widgets import Static

from localrt.tui.commands import COMMANDS
from localrt.tui.keys import KEYS, OTHER_KEYS, Key
from localrt.tui.screens.dialogs import HEADING, Dialog, hanging

_WIDTH = 18  # of what is typed, the space behind it included
_NARROW = 60  # columns; below that what it does stands on lines of its own


class HelpScreen(Dialog[None]):
    """Commands and keys; Esc, q or F1 closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,f1,enter", "leave", show=False, priority=True)
    ]

    def __init__(self, keys: Sequence[Key] = KEYS) -> None:
        self._keys, self._page = keys, Static(help_page(keys))
        self._scroll = VerticalScroll(self._page)
        super().__init__(self._scroll, keys="Esc closes", tall=True)

    def on_resize(self, event: Resize) -> None:
        """The lines wrap anew."""

        def show() -> None:
            self._page.update(help_page(self._keys, self._scroll.scrollable_content_region.width))

        self.call_after_refresh(show)


def help_page(known: Sequence[Key] = KEYS, width: int = 80) -> Content:
    """Commands and keys under their headings: what to type, what it does."""
    commands = [(entry.usage, entry.does) for entry in COMMANDS]
    commands.append(("@PATH", "in a message: attach that file"))
    commands.append(("//TEXT", "send text that begins with a slash"))
    keys = [*OTHER_KEYS, *((key.shown, key.does) for key in known)]
    parts: list[tuple[str, str]] = []
    for heading, rows in (("Commands", commands), ("Keys", keys)):
        parts.append((f"{heading}\n", HEADING))
        for left, right in rows:
            gap = "\n  " if width < _NARROW else " " * (_WIDTH - len(left))
            parts += [(left, "$text-accent"), (f"{gap}{right}\n", "$foreground")]
        parts.append(("\n", ""))
    page = Content.assemble(*parts).rstrip()
    return hanging(page, width, 2 if width < _NARROW else _WIDTH)
