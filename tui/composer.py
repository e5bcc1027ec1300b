"""Where the person writes: Enter sends, Ctrl+J breaks the line, Up and Down walk the history.

Knows keys and text. What a message means, and whether it can be sent now, is the app's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Key
from textual.message import Message
from textual.widgets import TextArea

from localrt.tui.commands import completion

__all__ = ["Composer"]

_NEWLINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter")
_TYPE_AHEAD_SECONDS = 0.3


class Composer(TextArea):
    """A text area that grows to eight lines and remembers what was sent."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "app.scroll_conversation('page_up')", show=False),
        Binding("pagedown", "app.scroll_conversation('page_down')", show=False),
        Binding("ctrl+home", "app.scroll_conversation('home')", show=False),
        Binding("ctrl+end", "app.scroll_conversation('end')", show=False),
    ]

    @dataclass
    class Submitted(Message):
        """Enter was pressed on ``text``, which is not blank."""

        text: str

    class EnterOnEmpty(Message):
        """Enter was pressed with nothing written."""

    def __init__(self, *, id: str | None = None, type_ahead: bool = False) -> None:
        super().__init__(id=id, soft_wrap=True, tab_behavior="focus", highlight_cursor_line=False)
        self._sent: list[str] = []
        self._place = 0  # index into the history; its length means "what is being written"
        self._draft = ""
        self._type_ahead = type_ahead

    def on_mount(self) -> None:
        """Lines typed before the app had the terminal come at once, their Enter as Ctrl+J."""
        self.set_timer(_TYPE_AHEAD_SECONDS, self._end_type_ahead)

    def _end_type_ahead(self) -> None:
        self._type_ahead = False

    def put(self, text: str) -> None:
        """Replace the text, with the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def put_back(self, text: str) -> None:
        """Give unsent text back, before whatever has been written meanwhile."""
        self.put(f"{text}\n\n{self.text}" if self.text.strip() else text)

    # -- keys ------------------------------------------------------------------------------------

    def on_key(self, event: Key) -> None:
        """Keys that differ from a plain text area's."""
        if event.key == "enter" or (event.key == "ctrl+j" and self._type_ahead):
            self._submit()
        elif event.key in _NEWLINE_KEYS:
            self.insert("\n")
        elif event.key == "tab":
            self.insert(completion(self.text) if self._at_end else "")
        else:
            return
        event.stop()
        event.prevent_default()

    def update_suggestion(self) -> None:
        """Show the rest of a command in grey; Tab and Right take it."""
        self.suggestion = completion(self.text) if self._at_end else ""

    def action_cursor_up(self, select: bool = False) -> None:
        """Up; on the first line, the message sent before."""
        if not select and self.navigator.is_first_wrapped_line(self.cursor_location):
            self._walk(-1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        """Down; on the last line, the message sent after."""
        if not select and self.navigator.is_last_wrapped_line(self.cursor_location):
            self._walk(+1)
        else:
            super().action_cursor_down(select)

    @property
    def _at_end(self) -> bool:
        return self.selection.is_empty and self.cursor_location == self.document.end

    def _submit(self) -> None:
        text = self.text.strip()
        if not text:
            self.post_message(self.EnterOnEmpty())
            return
        if not self._sent or self._sent[-1] != text:
            self._sent.append(text)
        self._place = len(self._sent)
        self._draft = ""
        self.clear()
        self.post_message(self.Submitted(text))

    def _walk(self, step: int) -> None:
        place = self._place + step
        if not 0 <= place <= len(self._sent):
            return
        if self._place == len(self._sent):
            self._draft = self.text
        self._place = place
        self.put(self._draft if place == len(self._sent) else self._sent[place])
        if step < 0:
            self.move_cursor((0, 0))
