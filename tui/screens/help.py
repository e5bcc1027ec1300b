"""The help screen: every command and key on one page that scrolls.

Knows the tables of commands and keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from localrt.tui.commands import COMMANDS
from localrt.tui.keys import KEYS, OTHER_KEYS, Key

__all__ = ["HelpScreen", "help_rows", "help_text"]

_WIDTH = 16


class HelpScreen(ModalScreen[None]):
    """Commands and keys; Esc, q or F1 closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f1,enter", "dismiss(None)", show=False, priority=True)
    ]

    def __init__(self, keys: Sequence[Key] = KEYS) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        """A scrolling page in a window."""
        with Vertical(classes="window tall"):
            with VerticalScroll():
                yield Static(_page(self._keys))
            yield Static("Esc closes", classes="keys")

    def on_mount(self) -> None:
        """The arrows scroll at once."""
        self.query_one(VerticalScroll).focus()


def help_rows(known: Sequence[Key] = KEYS) -> list[tuple[str, list[tuple[str, str]]]]:
    """Headings, and the rows under each: what to type, what it does."""
    commands = [(entry.usage, entry.does) for entry in COMMANDS]
    commands.append(("//TEXT", "send text that begins with a slash"))
    keys = [(key.shown, key.does) for key in known]
    return [("Commands", commands), ("Keys", [*OTHER_KEYS, *keys])]


def help_text(groups: Iterable[tuple[str, list[tuple[str, str]]]] | None = None) -> str:
    """The rows as plain lines."""
    lines: list[str] = []
    for heading, rows in help_rows() if groups is None else groups:
        lines += ["", heading] if lines else [heading]
        lines += [f"  {left:<{_WIDTH}} {right}" for left, right in rows]
    return "\n".join(lines)


def _page(keys: Sequence[Key]) -> Content:
    parts: list[Content | tuple[str, str]] = []
    for heading, rows in help_rows(keys):
        parts.append((f"{heading}\n", "$text-primary bold"))
        for left, right in rows:
            parts += [(f"{left:<{_WIDTH}} ", "$text-accent"), (f"{right}\n", "$foreground")]
        parts.append(("\n", ""))
    return Content.assemble(*parts).rstrip()
