"""Small windows: yes or no, text, one of several, a list, a tool call, help, and the conversations.

Each is a modal screen that passes its answer to the screen that opened it (``ask``). Windows keep
references to widgets they change: a thread may answer after a window has lost its children.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rich.cells import cell_len
from textual._styles_cache import StylesCache
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Key as KeyPressed
from textual.events import Resize
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import Worker, WorkerError

from localrt.common.errors import LocalrtError
from localrt.common.formatting import as_line
from localrt.history.messages import Decision
from localrt.mcp.toolbox import PendingCall
from localrt.tui.commands import COMMANDS
from localrt.tui.conversation.state import ChatState
from localrt.tui.inputs import Input, TextArea
from localrt.tui.keys import KEYS, OTHER_KEYS, Key
from localrt.tui.text import clean, human_when, one_line, short_name
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt import ConversationInfo

SMALLEST = Size(30, 8)
HEADING = "$text-primary bold"
_TAKE = "Enter save · Esc cancel"
_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")


def ask(
    screen: Screen[Any], dialog: ModalScreen[_Answer | None], take: Callable[[_Answer], object]
) -> None:
    """Open a dialog; ``take`` is called with the answer, if there is one. Its error is told."""

    def closed(answer: _Answer | None) -> None:
        try:
            if answer is not None:
                take(answer)
        except LocalrtError as error:
            screen.app.notify(one_line(error), severity="error", markup=False)

    screen.app.push_screen(dialog, closed)


def hanging(content: Content, width: int, indent: int = 2) -> Content:
    """The text in lines of ``width`` columns; continuation lines are indented."""
    lines: list[Content] = []
    for line in content.split("\n"):
        while line.cell_length > width > 2 * indent:
            fits = next(n for n in range(len(line), 0, -1) if cell_len(line.plain[:n]) <= width)
            at = line.plain.rfind(" ", 0, fits + 1)
            if not line.plain[: max(at, 0)].strip():
                at = fits
            lines.append(line[:at].rstrip())
            rest = line[at:]
            rest = rest[len(rest.plain) - len(rest.plain.lstrip()) :]
            line = rest.pad_left(indent)
        lines.append(line)
    return Content("\n").join(lines)


class Palette(CommandPalette):
    """Textual's, which a second Enter or Esc would close again, and the window below with it."""

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close, once."""
        return super().dismiss(result) if self.app.screen is self else AwaitComplete()

    def _select_or_command(self, event: Any = None) -> None:
        if self.app.screen is self:
            super()._select_or_command(event)


class Dialog(ModalScreen[_Answer | None]):
    """A window with stacked ``parts`` and a line about its ``keys``; Esc gives no answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False, priority=True)]

    def __init__(self, *parts: Widget, keys: str = "", tall: bool = False) -> None:
        super().__init__()
        self.key_line = Static(keys, classes="keys", markup=False)
        self._parts = (*parts, self.key_line) if keys else parts
        self._tall = tall

    def compose(self) -> ComposeResult:
        yield Vertical(*self._parts, classes="window tall" if self._tall else "window")

    def dismiss(self, result: _Answer | None = None) -> AwaitComplete:
        """Close, once, and only on top: keys may be on their way when one changes the windows."""
        if self.app.screen is not self:
            return AwaitComplete()
        return super().dismiss(result)

    def on_unmount(self) -> None:
        """Free what was drawn: a cache of colours in Textual keeps closed windows' lines."""
        StylesCache.get_inner_outer.cache_clear()

    def action_leave(self) -> None:
        """Close without an answer."""
        self.dismiss(None)


class Confirm(Dialog[bool]):
    """A question; y is yes, n, Esc or the beginning of a text no. Enter, which is easily pressed
    twice, does nothing.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes", show=False),
        Binding("n", "leave", "No", show=False),
    ]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__(Static(clean(question), markup=False), keys=f"y {yes} · n cancel")

    def on_key(self, event: KeyPressed) -> None:
        if event.is_printable and event.character != "y":
            self.action_leave()


class Ask(Dialog[str]):
    """A line of text.

    ``check`` may raise an error about the text, which is shown; the dialog then stays open.
    """

    def __init__(
        self,
        question: str | Content,
        value: str = "",
        check: Callable[[str], object] = lambda text: None,
    ) -> None:
        problem = Static(id="problem", markup=False)
        line = Input(value, select_on_focus=True, compact=True)
        super().__init__(Static(question, markup=False), line, problem, keys=_TAKE)
        self._check, self._problem = check, problem
        problem.display = False

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            self._check(event.value)
        except LocalrtError as error:
            self._problem.display = True
            self._problem.update(one_line(error))
        else:
            self.dismiss(event.value)


class AskLines(Dialog[str]):
    """A text of several lines."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+s", "take", show=False)]

    def __init__(self, name: str, text: str) -> None:
        lines = TextArea(text, compact=True)
        super().__init__(
            Static(Content.styled(name, HEADING)), lines, keys="Ctrl+S save · Esc cancel"
        )
        self._editor = lines

    def action_take(self) -> None:
        self.dismiss(self._editor.text)


class Choose(Dialog[str]):
    """One of several: ``options`` are (answer, label)."""

    def __init__(
        self,
        title: str | Content,
        options: Sequence[tuple[str, str]],
        *,
        keys: str = "",
        tall: bool = False,
    ) -> None:
        rows = OptionList(*(Option(text, id=id) for id, text in options), compact=True)
        super().__init__(Static(title, markup=False), rows, keys=keys, tall=tall)
        self.rows = rows

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


class TooSmall(ModalScreen[None]):
    """Covers everything until the terminal is large enough."""

    def compose(self) -> ComposeResult:
        yield Static(id="too-small", markup=False)

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        self.query_one("#too-small", Static).update(
            f"Terminal too small: {width}x{height}, needs {SMALLEST.width}x{SMALLEST.height}"
        )


class SearchDialog(Dialog[str], Generic[_Item]):
    """A search line, which keeps the focus, above a list of items through which the arrows move.

    A subclass lists the items that match ``search_text`` (``fill``), draws a row (``draw``), and
    handles Enter and clicks (``take``).
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", show=False),
        Binding("up", "move(-1)", show=False),
        Binding("pagedown", "move(10)", show=False),
        Binding("pageup", "move(-10)", show=False),
    ]

    def __init__(self, search: str, placeholder: str, *below: Widget, keys: str) -> None:
        line = Input(search, placeholder=placeholder, compact=True)
        rows = OptionList(compact=True)
        rows.can_focus = False
        super().__init__(line, rows, *below, keys=keys, tall=True)
        self.line, self.rows = line, rows
        self.search_text = search  # the search that the list shows
        self.items: Sequence[_Item] = ()

    def fill(self) -> None:
        raise NotImplementedError

    def draw(self, item: _Item) -> Content:
        raise NotImplementedError

    def take(self, item: _Item) -> None:
        raise NotImplementedError

    def show(self, items: Sequence[_Item], none: str, *, highlighted: int = 0) -> None:
        """List the items, or show ``none`` if there are none."""
        self.items = items
        self.rows.clear_options()
        self.add_rows(items)
        if items:
            self.rows.highlighted = min(highlighted, len(items) - 1)
        else:
            self.rows.add_option(Option(none, disabled=True))

    def add_rows(self, items: Sequence[_Item]) -> None:
        self.rows.add_options(Option(self._row(item)) for item in items)

    def _row(self, item: _Item) -> Content:
        return hanging(self.draw(item), self.rows.scrollable_content_region.width)

    def redraw(self, place: int) -> None:
        self.rows.replace_option_prompt_at_index(place, self._row(self.items[place]))

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._redraw_all)

    async def _redraw_all(self) -> None:
        for place in range(len(self.items)):
            self.redraw(place)

    @property
    def chosen(self) -> _Item | None:
        place = self.rows.highlighted
        return self.items[place] if place is not None and place < len(self.items) else None

    def on_input_changed(self, event: Input.Changed) -> None:
        self.find(event.value)

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take what is chosen in the list of this search, which may not be filled yet."""
        self.find(event.value)
        await self.filled()
        if self.chosen is not None:
            self.take(self.chosen)

    async def filled(self) -> None:
        """Wait until the list is that of ``search_text``."""

    def find(self, query: str) -> None:
        if query != self.search_text:
            self.search_text = query
            self.fill()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_index < len(self.items):
            self.take(self.items[event.option_index])

    def action_leave(self) -> None:
        """Esc: empty the search, then close."""
        if self.line.value:
            self.line.value = ""
        else:
            self.dismiss(None)

    def action_move(self, step: int) -> None:
        if self.items:
            place = (self.rows.highlighted or 0) + step
            self.rows.highlighted = max(0, min(place, len(self.items) - 1))


_QUIET_SECONDS = 0.5
_DECISIONS: dict[str, Decision] = {"y": "once", "a": "always", "n": "refuse"}


class AskCall(Dialog[Decision]):
    """Asks before a tool call: y allows it, a allows its tool in this chat; n and Esc refuse."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "leave", show=False, priority=True)]

    def __init__(self, call: PendingCall) -> None:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False, indent=2)
        question = Content.assemble("The model wants to run ", (as_line(call.title), HEADING))
        shown = VerticalScroll(Static(clean(arguments), markup=False))
        keys = "y run once · a always in this conversation · n refuse"
        super().__init__(Static(question, markup=False), shown, keys=keys)
        self._last_key = monotonic()

    def on_key(self, event: KeyPressed) -> None:
        """Close with the decision, unless the user is typing a message."""
        before, self._last_key = self._last_key, monotonic()
        decision = _DECISIONS.get(event.key)
        if decision is not None and self._last_key - before >= _QUIET_SECONDS:
            self.dismiss(decision)


_WIDTH = 18  # columns of a command or key, with the space after it
_NARROW = 60  # columns; if fewer, descriptions get their own lines


class HelpScreen(Dialog[None]):
    """Commands and keys; Esc, q or F1 closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,f1,enter", "leave", show=False, priority=True)
    ]

    def __init__(self, keys: Sequence[Key] = KEYS) -> None:
        self._keys, self._page = keys, Static(help_page(keys))
        self._scroll = VerticalScroll(self._page)
        super().__init__(self._scroll, keys="Esc closes", tall=True)

    def on_resize(self, event: Resize) -> None:

        def show() -> None:
            self._page.update(help_page(self._keys, self._scroll.scrollable_content_region.width))

        self.call_after_refresh(show)


def help_page(keys: Sequence[Key] = KEYS, width: int = 80) -> Content:
    """Commands and keys under their headings, each with its help."""
    commands = [(entry.usage, entry.does) for entry in COMMANDS]
    commands.append(("@PATH", "in a message: attach that file"))
    commands.append(("//TEXT", "send text that begins with a slash"))
    pressed = [*OTHER_KEYS, *((key.label, key.does) for key in keys)]
    parts: list[tuple[str, str]] = []
    for heading, rows in (("Commands", commands), ("Keys", pressed)):
        parts.append((f"{heading}\n", HEADING))
        for left, right in rows:
            gap = "\n  " if width < _NARROW else " " * (_WIDTH - len(left))
            parts += [(left, "$text-accent"), (f"{gap}{right}\n", "$foreground")]
        parts.append(("\n", ""))
    page = Content.assemble(*parts).rstrip()
    return hanging(page, width, 2 if width < _NARROW else _WIDTH)


NEW = "new"  # the answer for a new conversation; ids are longer
_ROWS = 25  # that are drawn at once
_PAUSE = 0.15  # seconds without a key before a search begins
_KEYS = "Enter open · F2 rename · Ctrl+T pin · Ctrl+D delete · Ctrl+N new · Esc back"


class ConversationsScreen(SearchDialog["ConversationInfo"]):
    """Closes with the id of the conversation to open, ``NEW``, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f2,ctrl+r", "rename", show=False, priority=True),
        Binding("ctrl+d,ctrl+delete", "delete", show=False, priority=True),
        Binding("ctrl+n", f"dismiss({NEW!r})", show=False, priority=True),
        Binding("ctrl+t", "pin", show=False, priority=True),
    ]

    def __init__(self, state: ChatState, search: str = "") -> None:
        super().__init__(search, "Search conversations", keys=_KEYS)
        self._state = state

        self._wait: Timer | None = None
        self._listing: Worker[None] | None = None

    def on_input_changed(self, event: Input.Changed) -> None:
        event.prevent_default()  # search only when typing pauses
        if self._wait is not None:
            self._wait.stop()
        self._wait = self.set_timer(_PAUSE, lambda: self.find(self.line.value))

    def fill(self, *, keep: bool = False) -> None:
        """List in a thread; what was asked for last counts. ``keep`` the place in the list."""
        listing = partial(self._list, keep)
        self._listing = self.run_worker(listing, exclusive=True, group="list")

    async def _list(self, keep: bool) -> None:
        none = "Nothing found" if self.search_text.strip() else "No conversations yet"
        found: list[ConversationInfo] = []
        try:
            found = await asyncio.to_thread(self._state.list, self.search_text)
        except LocalrtError as error:
            none = one_line(error)
        place = (self.rows.highlighted or 0) if keep else 0
        self.show(found[:_ROWS], none, highlighted=place)
        for first in range(_ROWS, len(found), _ROWS):
            await asyncio.sleep(0)  # takes keys
            self.items = found[: first + _ROWS]
            self.add_rows(found[first : first + _ROWS])
            if first <= place:
                self.rows.highlighted = min(place, len(self.items) - 1)

    async def _redraw_all(self) -> None:
        self.fill(keep=True)
        await self.filled()  # before other keys

    async def filled(self) -> None:
        while self._listing is not None and not self._listing.is_finished:
            with suppress(WorkerError):  # another took its place
                await self._listing.wait()

    def draw(self, item: ConversationInfo) -> Content:
        here = "● " if item.id == self._state.conversation.id else "  "
        model = clean(short_name(item.model))
        facts = f"{human_when(item.updated, time.time())} · {item.turns} turns · {model}"
        parts = [
            (here, "$text-accent"),
            ("* " if item.pinned else "", "$text-accent"),
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

    def action_pin(self) -> None:
        if (info := self.chosen) is not None:
            self._change(lambda: self._state.pin(info.id))

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
        _: Worker[None] = self.run_worker(partial(self._changed, change), group="change")

    async def _changed(self, change: Callable[[], object]) -> None:
        try:
            await asyncio.to_thread(change)
        except LocalrtError as error:
            self.notify(one_line(error), severity="error", markup=False)
        self.fill(keep=True)
