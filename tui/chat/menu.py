"""The menu above the composer: what a slash command that is being written may become.

It never has the focus: the composer moves its highlight and takes what is chosen.
"""

from __future__ import annotations

from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.widget import Widget

from localrt.tui.commands import Suggestion, suggestions
from localrt.tui.themes import FAINT

_MOST = 8  # rows


class CommandMenu(Widget, can_focus=False):
    """``show_for`` a text; hidden while nothing fits it."""

    ALLOW_SELECT = False

    class Chosen(Message):
        """A row was clicked: it is the highlighted one now."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Suggestion] = []
        self.index = 0
        self._text = ""
        self.display = False

    @property
    def is_open(self) -> bool:
        """Whether there is something to choose from."""
        return bool(self.display) and len(self.items) > 0

    @property
    def chosen(self) -> Suggestion | None:
        """The highlighted suggestion."""
        return self.items[self.index] if self.is_open else None

    def show_for(self, text: str) -> None:
        """Suggestions for what is written now."""
        if text == self._text:
            return  # also when it was closed
        self._text = text
        items = suggestions(text)
        if items == self.items and self.is_open == bool(items):
            return
        self.items, self.index = items, 0
        self.display = bool(items)
        self.refresh(layout=True)

    def close(self) -> None:
        """Hide until the text changes."""
        self.display = False

    def move(self, step: int) -> None:
        """Highlight the next (+1) or previous (-1) row, round the ends."""
        if self.items:
            self.index = (self.index + step) % len(self.items)
            self.refresh()

    @property
    def _first(self) -> int:
        return max(0, min(self.index - _MOST // 2, len(self.items) - _MOST))

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        """As many rows as there are, up to eight."""
        return min(len(self.items), _MOST)

    def render(self) -> Content:
        """A row per suggestion: usage, what it does."""
        shown = self.items[self._first : self._first + _MOST]
        width = max((len(item.label) for item in self.items), default=0) + 2
        chosen = "$text on $primary-muted" + (" reverse" if self.app.no_color else "")
        rows = []
        for place, item in enumerate(shown, self._first):
            row = f"{item.label:<{width}}{item.does}"[: max(self.size.width, 1)]
            if place == self.index and len(self.items) > 1:
                row = f"{row:<{self.size.width}}"
                rows.append(Content.assemble((row, chosen)))
            else:
                rows.append(Content.assemble((row[:width], "$foreground"), (row[width:], FAINT)))
        return Content("\n").join(rows)

    def on_click(self, event: Click) -> None:
        """Choose with the mouse."""
        place = self._first + event.y
        if place < len(self.items):
            self.index = place
            self.post_message(self.Chosen())
