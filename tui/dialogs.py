"""Small windows: yes or no, a line of text, one of several, and a screen that is too small.

Each is a modal screen that hands its answer to whoever pushed it. Knows nothing of conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

__all__ = ["SMALLEST", "Ask", "Choose", "Confirm", "TooSmall"]

SMALLEST = Size(30, 8)


class Confirm(ModalScreen[bool]):
    """A question; y or Enter says yes, n or Esc no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "answer(True)", "Yes", show=False),
        Binding("n,escape", "answer(False)", "No", show=False),
    ]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__()
        self._question, self._yes = question, yes

    def compose(self) -> ComposeResult:
        """The question, and what the keys do."""
        with Vertical(classes="window"):
            yield Static(self._question, markup=False)
            yield Static(f"y {self._yes} · n keep", classes="keys", markup=False)

    def action_answer(self, yes: bool) -> None:
        """Close with the answer."""
        self.dismiss(yes)


class Ask(ModalScreen[str | None]):
    """A line of text; None when Esc was pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", show=False)]

    def __init__(self, question: str, value: str = "") -> None:
        super().__init__()
        self._question, self._value = question, value

    def compose(self) -> ComposeResult:
        """The question over an input."""
        with Vertical(classes="window"):
            yield Static(self._question, markup=False)
            yield Input(self._value, select_on_focus=True, compact=True)
            yield Static("Enter takes it · Esc keeps", classes="keys", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close with the text."""
        self.dismiss(event.value)


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
