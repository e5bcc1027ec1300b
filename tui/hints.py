"""The line above the composer: what is worth knowing just now, one thing at a time.

Knows the chat screen's state and two short-lived lines: a flash, and a question that the same key
answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrt.tui.answer import Answer

if TYPE_CHECKING:
    from textual.timer import Timer

    from localrt.tui.chat_screen import ChatScreen

__all__ = ["Hints"]

_CONFIRM_SECONDS = 2.0  # in which a second Ctrl+C quits
_FLASH_SECONDS = 3.0


class Hints:
    """``text`` is what to show."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._question = ""
        self._flash = ""
        self._timers: dict[str, Timer] = {}

    @property
    def confirming(self) -> bool:
        """Whether the same key once more means it."""
        return bool(self._question)

    def confirm(self, question: str) -> None:
        """Ask for the same key again, for two seconds."""
        self._question = question
        self._later("question", _CONFIRM_SECONDS)

    def flash(self, text: str) -> None:
        """Show a line for three seconds."""
        self._flash = text
        self._later("flash", _FLASH_SECONDS)

    def text(self) -> str:
        """The line; empty when there is nothing to say."""
        screen = self._screen
        if self._question or self._flash:
            return self._question or self._flash
        if screen.actions.editing is not None:
            return "Editing: Enter sends it as a new branch, Esc leaves it as it was"
        if screen.turns.waiting == 1:
            return "1 message waits: Esc takes it back"
        if screen.turns.waiting:
            return f"{screen.turns.waiting} messages wait: Esc takes them back"
        if screen.view.marked is not None:
            return self._marked()
        if screen.turns.answering and not screen.view.follows:
            return "More below: Ctrl+End"
        return ""

    def _marked(self) -> str:
        block = self._screen.view.marked
        assert block is not None
        parts = ["Enter menu", "Alt+C copy"]
        parts.append("Ctrl+R again" if isinstance(block, Answer) else "Alt+E edit")
        if block.branches > 1:
            parts.append(f"Alt+←→ branch {block.branch}/{block.branches}")
        if block.foldable:
            parts.append("Ctrl+T unfold")
        return " · ".join([*parts, "Esc"])

    def _later(self, name: str, seconds: float) -> None:
        if name in self._timers:
            self._timers[name].stop()
        self._timers[name] = self._screen.set_timer(seconds, lambda: self._end(name))
        self._screen.show_hint()

    def _end(self, name: str) -> None:
        setattr(self, f"_{name}", "")
        self._screen.show_hint()
