"""The line in which words are typed that are to be found in the conversation.

Knows the view that finds them and the widget that gets the focus back.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Input, Static

from localrt.tui.chat.view import ConversationView

_KEYS = "Enter next · Up previous · Esc closes"


class FindBar(Horizontal):
    """Hidden until ``open``."""

    DEFAULT_CSS = """
    FindBar {
        display: none;
        height: 1;
        padding: 0 3;
        background: $surface;
    }
    FindBar > Input { width: 1fr; margin: 0 1; background: $panel; }
    FindBar > Static { width: auto; color: $text-muted; }
    FindBar.-tight > #find-keys { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,ctrl+j", "move(1)", show=False),
        Binding("up,shift+enter", "move(-1)", show=False),
        Binding("escape", "close", show=False),
        Binding("pageup", "screen.scroll_conversation('page_up')", show=False),
        Binding("pagedown", "screen.scroll_conversation('page_down')", show=False),
    ]

    def __init__(self, view: ConversationView, back: Widget) -> None:
        super().__init__(id="find")
        self._view, self._back = view, back
        self._words = Input(placeholder="in this conversation", compact=True)
        self._count = Static("", id="find-count", markup=False)

    def compose(self) -> ComposeResult:
        """What is looked for, how often it is there, what the keys do."""
        yield Static("Find")
        yield self._words
        yield self._count
        yield Static(f" · {_KEYS}", id="find-keys", markup=False)

    def open(self, words: str = "") -> None:
        """Show it, with these words or those of before; open already, go to the next match."""
        if self.display and self._words.has_focus and not words:
            self.action_move(1)
            return
        self.display = True
        self._words.value = words or self._words.value
        self._words.focus()
        self._words.action_end()
        self._find()

    def close(self) -> bool:
        """Hide it; whether it was open."""
        if not self.display:
            return False
        self.display = False
        self._view.find("")
        self._back.focus()
        return True

    def action_close(self) -> None:
        """Esc."""
        self.close()

    def action_move(self, step: int) -> None:
        """Go to the next or previous match."""
        self._view.find_next(step)
        self._tell()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter."""
        event.stop()
        self.action_move(1)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Find what is typed so far."""
        event.stop()
        if self.display:
            self._find()

    def on_resize(self) -> None:
        """A narrow terminal shows the words and their count alone."""
        self.set_class(self.size.width < 70, "-tight")

    def _find(self) -> None:
        self._view.find(self._words.value)
        self._tell()

    def _tell(self) -> None:
        place, total = self._view.found
        text = f"{place} of {total}" if total else "not found"
        self._count.update(text if self._words.value.strip() else "")
