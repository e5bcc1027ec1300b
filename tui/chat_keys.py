"""What the keys of the chat set going: stopping, leaving, other conversations, windows.

A base of the chat screen, which has the parts that are named here; what can be done with a turn is
in ``turn_actions.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from textual.app import SuspendNotSupported
from textual.binding import BindingType
from textual.screen import Screen

from localrt.errors import LocalrtError
from localrt.tui.blocks import Kind
from localrt.tui.composer import Composer
from localrt.tui.conversation import Conversation
from localrt.tui.conversations_screen import NEW, ConversationsScreen
from localrt.tui.dialogs import Ask
from localrt.tui.editor import edited
from localrt.tui.help_screen import HelpScreen
from localrt.tui.hints import Hints
from localrt.tui.keys import bindings
from localrt.tui.slash import Slash
from localrt.tui.text import one_line
from localrt.tui.turn_actions import TurnActions
from localrt.tui.turns import Turns

if TYPE_CHECKING:
    from localrt.tui.app import ChatApp
    from localrt.tui.desk import Desk
    from localrt.tui.session import Session

__all__ = ["ChatKeys"]


class ChatKeys(Screen[None]):
    """The actions behind ``KEYS``."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]
    app: ChatApp
    desk: Desk
    view: Conversation
    composer: Composer
    turns: Turns
    actions: TurnActions
    slash: Slash
    hints: Hints

    def say(self, text: str, kind: Kind = "info") -> None:
        """A line of the app, at the end of the conversation."""
        raise NotImplementedError

    def show_hint(self) -> None:
        """Show what is worth knowing just now."""
        raise NotImplementedError

    def put(self, change: Callable[[], Session | None], said: str = "") -> None:
        """Put another conversation on the desk."""
        raise NotImplementedError

    # -- the answer and the turns ----------------------------------------------------------------

    def action_turn(self, name: str) -> None:
        """Do something with the marked or last turn."""
        self.actions.do(name)
        self.show_hint()

    def action_mark(self, step: int) -> None:
        """Mark the turn above or below."""
        self.view.mark_next(step)
        self.show_hint()

    def action_stop(self) -> None:
        """Esc: stop the answer, bring waiting messages back; else unmark, stop editing."""
        waiting = self.turns.take_back()
        if waiting:
            self.composer.put_back(waiting)
        if self.turns.answering:
            self.turns.cancel()
        elif not self.actions.stop_editing() or self.view.marked is not None:
            self.view.mark(None)
        self.show_hint()

    async def action_interrupt(self) -> None:
        """Ctrl+C: copy what is selected, else stop; the second one in a row quits."""
        selected = self.composer.selected_text or self.get_selected_text()
        if self.hints.confirming:
            await self.app.action_quit()
        elif selected:
            self.app.copy_to_clipboard(selected)
            self.clear_selection()
        else:
            self.turns.cancel()
            self.hints.confirm("Ctrl+C again quits")

    # -- conversations ---------------------------------------------------------------------------

    def action_conversations(self) -> None:
        """Open the list."""
        self.list_conversations("")

    def list_conversations(self, search: str) -> None:
        """Open the list with a search in it."""

        def chosen(id: str | None) -> None:
            if id == NEW:
                self.action_new()
            elif id is not None and id != self.desk.talk.id:
                self.put(lambda: self.desk.open(id))

        self.app.push_screen(ConversationsScreen(self.desk, search), chosen)

    def action_new(self) -> None:
        """Begin another conversation."""
        if self.desk.talk.turns or self.view.blocks:
            self.put(self.desk.new, "New conversation")

    def action_rename(self) -> None:
        """Ask for the conversation's name."""

        def named(title: str | None) -> None:
            if title is not None:
                self.desk.talk.set(title=title.strip())

        self.app.push_screen(Ask("Name of this conversation", self.desk.talk.title), named)

    async def action_export(self) -> None:
        """Write the conversation as Markdown."""
        try:
            await self.slash.export()
        except LocalrtError as error:
            self.say(one_line(error), "error")

    # -- windows ---------------------------------------------------------------------------------

    def action_editor(self) -> None:
        """Write the message in another program; an answer goes on meanwhile."""
        try:
            with self.app.suspend():
                text = edited(self.composer.text)
        except SuspendNotSupported:
            self.say("An editor needs a terminal of its own, which this is not", "error")
        except LocalrtError as error:
            self.say(one_line(error), "error")
        else:
            self.composer.put(text)
        self.refresh(layout=True)

    def action_help(self) -> None:
        """Commands and keys."""
        self.app.push_screen(HelpScreen())

    def action_scroll_conversation(self, where: str) -> None:
        """Scroll by ``page_up`` or ``page_down``, or to ``home`` or ``end``."""
        getattr(self.view, f"scroll_{where}")(animate=False)
        self.call_after_refresh(self.show_hint)
