"""A window with a search line above a list: the keys that all such windows have.

The search line keeps the focus; arrows move in the list. What is listed is the subclass's.
"""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList

__all__ = ["PickingScreen"]


class PickingScreen(ModalScreen[str | None]):
    """Closes with what was picked, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False, priority=True),
        Binding("down", "move(1)", show=False),
        Binding("up", "move(-1)", show=False),
        Binding("pagedown", "move(10)", show=False),
        Binding("pageup", "move(-10)", show=False),
    ]

    def count(self) -> int:
        """How many of the list's rows can be picked: its first ones."""
        raise NotImplementedError

    def action_leave(self) -> None:
        """Esc: empty the search, then close."""
        search = self.query_one(Input)
        if search.value:
            search.value = ""
        else:
            self.dismiss(None)

    def action_move(self, step: int) -> None:
        """Highlight another row."""
        options = self.query_one(OptionList)
        if self.count():
            place = (options.highlighted or 0) + step
            options.highlighted = max(0, min(place, self.count() - 1))
