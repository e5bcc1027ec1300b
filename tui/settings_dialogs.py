"""Windows of the settings: a value that is checked, a text of several lines, a theme to look at.

Each hands its answer to whoever pushed it. Knows nothing of what the values are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from localrt.errors import LocalrtError
from localrt.tui.text import one_line
from localrt.tui.themes import offered

__all__ = ["Edit", "EditText", "PickTheme"]

_HEADING = "$text-primary bold"


class Edit(ModalScreen[bool]):
    """A value; ``take`` raises what is wrong with it, which is said, and it is asked again."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(False)", show=False)]
    DEFAULT_CSS = """
    Edit #problem { color: $text-error; height: auto; }
    """

    def __init__(self, name: str, help: str, value: str, take: Callable[[str], None]) -> None:
        super().__init__()
        self._what, self._help, self._value, self._take = name, help, value, take

    def compose(self) -> ComposeResult:
        """Name and help over an input."""
        with Vertical(classes="window"):
            yield Static(Content.assemble((self._what, _HEADING), f"\n{self._help}"))
            yield Input(self._value, select_on_focus=True, compact=True)
            yield Static(id="problem", markup=False)
            yield Static("Enter takes it · Esc keeps", classes="keys", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take it, or say why not."""
        try:
            self._take(event.value)
        except LocalrtError as error:
            self.query_one("#problem", Static).update(one_line(error))
        else:
            self.dismiss(True)


class EditText(ModalScreen[str | None]):
    """A text of several lines; None when Esc was pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", show=False, priority=True),
        Binding("ctrl+s", "take", show=False),
    ]
    DEFAULT_CSS = """
    EditText TextArea { height: 10; border: none; background: $panel; }
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self._what, self._text = name, text

    def compose(self) -> ComposeResult:
        """The name over a text area."""
        with Vertical(classes="window"):
            yield Static(Content.styled(self._what, _HEADING))
            yield TextArea(self._text, compact=True)
            yield Static("Ctrl+S takes it · Esc keeps", classes="keys", markup=False)

    def action_take(self) -> None:
        """Close with the text."""
        self.dismiss(self.query_one(TextArea).text)


class PickTheme(ModalScreen[str | None]):
    """A theme by name; walking shows it, Esc brings the one before back."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]

    def compose(self) -> ComposeResult:
        """The names."""
        self._before = self.app.theme
        with Vertical(classes="window tall"):
            yield Static(Content.styled("Theme", _HEADING))
            yield OptionList(*(Option(name, id=name) for name in offered(self.app)), compact=True)
            yield Static("Enter takes it · Esc keeps", classes="keys", markup=False)

    def on_mount(self) -> None:
        """Begin at the present one."""
        names = offered(self.app)
        options = self.query_one(OptionList)
        options.highlighted = names.index(self._before) if self._before in names else 0
        options.focus()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show it."""
        if event.option.id is not None:
            self.app.theme = event.option.id

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Keep it."""
        self.dismiss(event.option.id)

    def action_leave(self) -> None:
        """As it was."""
        self.app.theme = self._before
        self.dismiss(None)
