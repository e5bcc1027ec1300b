"""The scrolling conversation: turns, notices, and the rule of when the view follows new text.

The view follows while it is at the bottom and stays where the reader is otherwise. Knows how turns
look, not where they come from.
"""

from __future__ import annotations

from typing import Literal

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localrt.tui.answer import Answer
from localrt.tui.text import clean

__all__ = ["Conversation", "Kind", "Notice", "UserTurn"]

Kind = Literal["info", "error", "mark"]


class UserTurn(Static):
    """What the person wrote, as written; ``waiting`` until it is sent."""

    def __init__(self, text: str, *, waiting: bool = False) -> None:
        super().__init__(Content(clean(text)), classes="waiting" if waiting else None)
        self.message = text

    def sent(self) -> None:
        """The message is on its way to the model."""
        self.remove_class("waiting")


class Notice(Static):
    """A line of the app itself: information, an error, or a mark below an answer."""

    def __init__(self, text: str, kind: Kind = "info") -> None:
        super().__init__(Content(clean(text)), classes=kind)


class Conversation(VerticalScroll, can_focus=False, can_focus_children=False):
    """Turns and notices, oldest first."""

    def on_mount(self) -> None:
        """Follow new text from when there is more than fits.

        An anchored view with little text would show it at the bottom edge.
        """
        self.watch(self, "virtual_size", self._anchor_when_full, init=False)

    def on_resize(self) -> None:
        """A smaller view may hold the text no longer."""
        self._anchor_when_full()

    def _anchor_when_full(self) -> None:
        full = self.max_scroll_y > 0
        if full != self.is_anchored:
            self.anchor(full)
            if not full:
                self.scroll_home(animate=False, force=True, immediate=True)

    @property
    def follows(self) -> bool:
        """Whether the view is at the bottom, and stays there as text arrives."""
        return self.max_scroll_y - self.scroll_y < 1

    def follow(self) -> None:
        """Go to the newest text and stay with it."""
        if self.is_anchored:
            self.anchor()

    def add_user(self, text: str, *, waiting: bool = False) -> UserTurn:
        """A message of the person; the view goes to it."""
        turn = UserTurn(text, waiting=waiting)
        self.mount(turn)
        self.follow()
        return turn

    def add_answer(self, text: str = "", *, after: UserTurn | None = None) -> Answer:
        """An answer, empty while it is still to come; below ``after`` or at the end."""
        answer = Answer(text)
        self.mount(answer, after=after)
        return answer

    def add_notice(
        self,
        text: str,
        kind: Kind = "info",
        *,
        after: Answer | UserTurn | None = None,
    ) -> None:
        """A line of the app, at the end unless a place is given."""
        self.mount(Notice(text, kind), after=after)

    async def clear(self) -> None:
        """Remove everything."""
        await self.remove_children()
