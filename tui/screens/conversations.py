"""The list of conversations: search, open, rename, delete, begin a new one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localrt.errors import LocalrtError
from localrt.tui.conversation.state import ChatState
from localrt.tui.screens.dialogs import Ask, Confirm, SearchScreen, ask
from localrt.tui.text import clean, human_when, one_line, short_name
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt import ConversationInfo

__all__ = ["NEW", "ConversationsScreen"]

NEW = "new"  # the answer for a new conversation; ids are longer
_PAUSE = 0.15  # seconds without a key before a search begins


class ConversationsScreen(SearchScreen):
    """Closes with the id of the conversation to open, ``NEW``, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f2,ctrl+r", "rename", show=False, priority=True),
        Binding("ctrl+d,ctrl+delete", "delete", show=False, priority=True),
        Binding("ctrl+n", "new", show=False, priority=True),
    ]

    def __init__(self, state: ChatState, search: str = "") -> None:
        super().__init__()
        self._state = state
        self._search = search
        self._found: Sequence[ConversationInfo] = ()

    def compose(self) -> ComposeResult:
        """Search line, list, what the keys do."""
        with Vertical(classes="window tall"):
            yield Input(self._search, placeholder="Search conversations", compact=True)
            yield OptionList(compact=True)
            yield Static(
                "Enter open · F2 rename · Ctrl+D delete · Ctrl+N new · Esc back",
                classes="keys",
                markup=False,
            )

    def on_mount(self) -> None:
        """Show what there is; the search line keeps the focus."""
        self.query_one(OptionList).can_focus = False
        self._timer = self.set_timer(_PAUSE, self._refill, pause=True)
        self._refill()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search when the typing pauses."""
        if event.value != self._search:
            self._search = event.value
            self._timer.stop()
            self._timer = self.set_timer(_PAUSE, self._refill)

    def _refill(self, keep: int = 0) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        try:
            self._found = self._state.list(self._search)
        except LocalrtError as error:
            self._found = ()
            options.add_option(Option(one_line(error), disabled=True))
            return
        now = time.time()
        options.add_options(Option(self._row(info, now), id=info.id) for info in self._found)
        if self._found:
            options.highlighted = min(keep, len(self._found) - 1)
        else:
            none = "Nothing found" if self._search.strip() else "No conversations yet"
            options.add_option(Option(none, disabled=True))

    def _row(self, info: ConversationInfo, now: float) -> Content:
        here = "● " if info.id == self._state.conversation.id else "  "
        model = clean(short_name(info.model))
        facts = f"{human_when(info.updated, now)} · {info.turns} turns · {model}"
        parts: list[tuple[str, str]] = [
            (here, "$text-accent"),
            (clean(info.title) or "Untitled", "bold"),
            ("\n", ""),
            (f"  {facts}", FAINT),
        ]
        if info.snippet and self._search.strip():
            parts += [("\n", ""), (f"  {clean(info.snippet)}", "$foreground 80%")]
        return Content.assemble(*parts)

    @property
    def _chosen(self) -> ConversationInfo | None:
        place = self.query_one(OptionList).highlighted
        return self._found[place] if place is not None and place < len(self._found) else None

    # -- keys ------------------------------------------------------------------------------------

    def count(self) -> int:
        """See ``SearchScreen``."""
        return len(self._found)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter opens; a search that has not run yet runs first."""
        self._timer.stop()
        if event.value != self._search or not self._found:
            self._search = event.value
            self._refill()
        if self._chosen is not None:
            self.dismiss(self._chosen.id)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """A click opens."""
        self.dismiss(event.option.id)

    def action_new(self) -> None:
        """Begin another."""
        self.dismiss(NEW)

    def action_rename(self) -> None:
        """Ask for a name."""
        if (info := self._chosen) is None:
            return

        def rename(title: str) -> None:
            self._change(lambda: self._state.rename(info.id, title.strip()))

        ask(self, Ask("Name of the conversation", info.title), rename)

    def action_delete(self) -> None:
        """Ask, then delete for good."""
        if (info := self._chosen) is None:
            return
        if info.id == self._state.conversation.id:
            self.notify("This one is open: /delete deletes it", markup=False)
            return

        def delete(yes: bool) -> None:
            self._change(lambda: self._state.delete(info.id))

        name = clean(info.title) or "Untitled"
        question = f"Delete “{name}” with its {info.turns} turns? This cannot be undone."
        ask(self, Confirm(question, "delete"), delete)

    def _change(self, change: Callable[[], object]) -> None:
        place = self.query_one(OptionList).highlighted or 0
        try:
            change()
        except LocalrtError as error:
            self.notify(one_line(error), severity="error", markup=False)
        self._refill(place)
