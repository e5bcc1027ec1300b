"""The list of conversations: search, open, rename, delete, or begin a new one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.timer import Timer

from localrt.common.errors import LocalrtError
from localrt.tui.conversation.state import ChatState
from localrt.tui.inputs import Input
from localrt.tui.screens.dialogs import Ask, Confirm, SearchDialog, ask
from localrt.tui.text import clean, human_when, one_line, short_name
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt import ConversationInfo

NEW = "new"  # the answer for a new conversation; ids are longer
_PAUSE = 0.15  # seconds without a key before a search begins
_KEYS = "Enter open · F2 rename · Ctrl+D delete · Ctrl+N new · Esc back"


class ConversationsScreen(SearchDialog["ConversationInfo"]):
    """Closes with the id of the conversation to open, ``NEW``, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f2,ctrl+r", "rename", show=False, priority=True),
        Binding("ctrl+d,ctrl+delete", "delete", show=False, priority=True),
        Binding("ctrl+n", f"dismiss({NEW!r})", show=False, priority=True),
    ]

    def __init__(self, state: ChatState, search: str = "") -> None:
        super().__init__(search, "Search conversations", keys=_KEYS)
        self._state = state

    def on_mount(self) -> None:
        self._wait: Timer | None = None
        self.fill()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.prevent_default()  # search only when typing pauses
        if self._wait is not None:
            self._wait.stop()
        self._wait = self.set_timer(_PAUSE, lambda: self.find(self.line.value))

    def fill(self, keep: int = 0) -> None:
        none = "Nothing found" if self.search_text.strip() else "No conversations yet"
        try:
            found = self._state.list(self.search_text)
        except LocalrtError as error:
            found, none = [], one_line(error)
        self.show(found, none, highlighted=keep)

    def draw(self, item: ConversationInfo) -> Content:
        here = "● " if item.id == self._state.conversation.id else "  "
        model = clean(short_name(item.model))
        facts = f"{human_when(item.updated, time.time())} · {item.turns} turns · {model}"
        parts = [
            (here, "$text-accent"),
            (clean(item.title) or "Untitled", "bold"),
            (f"\n  {facts}", FAINT),
        ]
        if item.snippet and self.search_text.strip():
            parts.append((f"\n  {clean(item.snippet)}", "$foreground 80%"))
        return Content.assemble(*parts)

    def take(self, item: ConversationInfo) -> None:
        self.dismiss(item.id)

    def action_rename(self) -> None:
        if (info := self.chosen) is None:
            return

        def rename(title: str) -> None:
            self._change(lambda: self._state.rename(info.id, title.strip()))

        ask(self, Ask("Name of the conversation", info.title), rename)

    def action_delete(self) -> None:
        if (info := self.chosen) is None:
            return
        if info.id == self._state.conversation.id:
            self.notify("This conversation is open: /delete deletes it", markup=False)
            return
        name = clean(info.title) or "Untitled"
        question = f"Delete “{name}” with its {info.turns} turns? This cannot be undone."
        question += self._state.damaged_copies

        def delete(yes: bool) -> None:
            self._change(lambda: self._state.delete(info.id))

        ask(self, Confirm(question, "delete"), delete)

    def _change(self, change: Callable[[], object]) -> None:
        place = self.rows.highlighted or 0
        try:
            change()
        except LocalrtError as error:
            self.notify(one_line(error), severity="error", markup=False)
        self.fill(place)
