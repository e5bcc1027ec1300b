"""Small windows: yes or no, a line or several of text, one of several, a list to search in.

Each is a modal screen that hands its answer to whoever pushed it (``ask``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from localrt.errors import LocalrtError
from localrt.tui.text import one_line

__all__ = [
    "HEADING",
    "SMALLEST",
    "Ask",
    "AskLines",
    "Choose",
    "Confirm",
    "SearchScreen",
    "TooSmall",
    "ask",
]

SMALLEST = Size(30, 8)
HEADING = "$text-primary bold"
_Answer = TypeVar("_Answer")


def ask(
    screen: Screen[Any], dialog: ModalScreen[_Answer | None], take: Callable[[_Answer], object]
) -> None:
    """Open a dialog; ``take`` gets the answer, unless it was left or denied."""

    def closed(answer: _Answer | None) -> None:
        if answer is not None and answer is not False:
            take(answer)

    screen.app.push_screen(dialog, closed)


class Confirm(ModalScreen[bool | None]):
    """A question; y or Enter says yes, n or Esc no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "dismiss(True)", "Yes", show=False),
        Binding("n,escape", "dismiss(False)", "No", show=False),
    ]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__()
        self._question, self._yes = question, yes

    def compose(self) -> ComposeResult:
        """The question, and what the keys do."""
        with Vertical(classes="window"):
            yield Static(self._question, markup=False)
            yield Static(f"y {self._yes} · n keep", classes="keys", markup=False)


class Ask(ModalScreen[str | None]):
    """A line of text; None when Esc was pressed.

    ``check`` may raise what is wrong with the text: that is shown, and it is asked again.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", show=False)]
    DEFAULT_CSS = """
    Ask #problem { color: $text-error; height: auto; }
    """

    def __init__(
        self,
        question: str | Content,
        value: str = "",
        check: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._question, self._value, self._check = question, value, check

    def compose(self) -> ComposeResult:
        """The question over an input."""
        with Vertical(classes="window"):
            yield Static(self._question, markup=False)
            yield Input(self._value, select_on_focus=True, compact=True)
            if self._check is not None:
                yield Static(id="problem", markup=False)
            yield Static("Enter takes it · Esc keeps", classes="keys", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close with the text, or say what is wrong with it."""
        try:
            if self._check is not None:
                self._check(event.value)
        except LocalrtError as error:
            self.query_one("#problem", Static).update(one_line(error))
        else:
            self.dismiss(event.value)


class AskLines(ModalScreen[str | None]):
    """A text of several lines; None when Esc was pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", show=False, priority=True),
        Binding("ctrl+s", "take", show=False),
    ]
    DEFAULT_CSS = """
    AskLines TextArea { height: 10; border: none; background: $panel; }
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self._what, self._text = name, text

    def compose(self) -> ComposeResult:
        """The name over a text area."""
        with Vertical(classes="window"):
            yield Static(Content.styled(self._what, HEADING))
            yield TextArea(self._text, compact=True)
            yield Static("Ctrl+S takes it · Esc keeps", classes="keys", markup=False)

    def action_take(self) -> None:
        """Close with the text."""
        self.dismiss(self.query_one(TextArea).text)


class Choose(ModalScreen[str | None]):
    """One of several, by id; None when Esc was pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", show=False)]

    def __init__(self, title: str, options: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._options = title, options

    def compose(self) -> ComposeResult:
        """The title over a list."""
        with Vertical(classes="window"):
            yield Static(self._title, markup=False)
            yield OptionList(*(Option(text, id=id) for id, text in self._options), compact=True)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Close with what was chosen."""
        self.dismiss(event.option.id)


class TooSmall(ModalScreen[None]):
    """Lies over everything until the terminal is large enough."""

    def compose(self) -> ComposeResult:
        """One line or several, as fits."""
        yield Static(id="too-small", markup=False)

    def on_resize(self, event: Resize) -> None:
        """Say what there is and what it takes."""
        width, height = event.size
        self.query_one("#too-small", Static).update(
            f"Terminal too small: {width}x{height}, needs {SMALLEST.width}x{SMALLEST.height}"
        )


class SearchScreen(ModalScreen[str | None]):
    """A search line, which keeps the focus, above a list in which the arrows move.

    Closes with what was picked, or None.
    """

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
