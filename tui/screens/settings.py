"""The settings screen: options with their help, system prompt, presets, theme, panel, keys.

A list to walk through; Enter changes a row, Delete restores its default, and errors appear where
the value was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Resize
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localrt.common.errors import LocalrtError, OptionError
from localrt.engine.option_help import OPTION_HELP
from localrt.history.presets import Defaults, Preset
from localrt.tui.conversation.state import ChatState, Session, option_text
from localrt.tui.preferences import PreferencesFile
from localrt.tui.screens.dialogs import (
    HEADING,
    Ask,
    AskLines,
    Choose,
    Confirm,
    Dialog,
    ask,
    hanging,
)
from localrt.tui.text import clean, one_line
from localrt.tui.themes import FAINT, offered

_NAME_WIDTH = 22
_VALUE_WIDTH = 36


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the list: its name, value and help, and what Enter and Delete do."""

    name: str
    value: str
    help: str
    change: Callable[[], None]
    reset: Callable[[], None] | None = None
    chosen: bool = False  # set by the user: drawn bold


class SettingsScreen(Dialog[None]):
    """``keys`` are (description, key) pairs to show; ``panel`` is whether the panel is open."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", show=False),
        Binding("delete,backspace", "reset", show=False),
    ]

    def __init__(
        self,
        state: ChatState,
        preferences: PreferencesFile,
        *,
        keys: Mapping[str, str],
        panel: bool = False,
        show_panel: Callable[[bool], None],
    ) -> None:
        options, help = OptionList(compact=True), Static(id="help", markup=False)
        super().__init__(options, help, keys="Enter change · Del default · Esc back", tall=True)
        self._list, self._help = options, help
        self._state, self._preferences, self._presets = state, preferences, state.presets
        self._keys = keys
        self._panel, self._show_panel = panel, show_panel
        self._rows: list[_Row | str] = []

    def on_mount(self) -> None:
        self._fill()
        self._list.focus()

    def _fill(self) -> None:
        options = self._list
        keep = options.highlighted
        config = self._preferences.path or "config.toml"
        key_help = f'To change it, add a line below [keys] in {config}: ACTION = "ctrl+l"'
        self._rows = [
            "App",
            self._theme_row(),
            self._panel_row(),
            "Presets",
            *(self._preset_row(preset) for preset in self._presets.list()),
            self._save_row(),
            "This conversation",
            self._system_row(),
            *(self._option_row(name) for name in OPTION_HELP),
            "New conversations",
            *self._new_rows(),
            f"Keys (change them in {config}, [keys])",
            *(_Row(does, key, key_help, lambda: None) for does, key in self._keys.items()),
        ]
        width = options.scrollable_content_region.width
        options.clear_options()
        options.add_options(
            Option(hanging(Content.styled(row, HEADING), width), disabled=True)
            if isinstance(row, str)
            else Option(_drawn(row, width))
            for row in self._rows
        )
        options.highlighted = 1 if keep is None else min(keep, len(self._rows) - 1)
        for note in self._presets.notes:
            self.notify(note, markup=False)

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._fill)

    # -- this conversation -----------------------------------------------------------------------

    @property
    def _session(self) -> Session:
        if self._state.session is None:
            raise OptionError("the model is still loading: set options when it is ready")
        return self._state.session

    @property
    def _options(self) -> dict[str, Any]:
        """The options that the user has set."""
        session = self._state.session
        return dict(self._state.conversation.options if session is None else session.chat.options)

    def _option_row(self, name: str) -> _Row:
        session, chosen = self._state.session, self._options
        value = option_text(name, chosen, {} if session is None else session.model.defaults)
        text = value if name in chosen else ""

        def set_option(text: str) -> None:
            self._session.set(f"{name} {text.strip() or 'none'}")

        def change() -> None:
            question = Content.assemble((name, HEADING), f"\n{OPTION_HELP[name]}")
            ask(self, Ask(question, text, set_option), lambda text: self._fill())

        def reset() -> None:
            self._try(lambda: set_option("none"))

        return _Row(name, value, OPTION_HELP[name], change, reset, name in chosen)

    def _system_row(self) -> _Row:
        system = self._state.conversation.system or ""

        def set_system(text: str) -> None:
            self._try(lambda: self._session.system(text.strip() or "none"))

        return _Row(
            "System prompt",
            " ".join(system.split()) or "none",
            "Instructions that the model reads before the conversation.",
            lambda: ask(self, AskLines("System prompt", system), set_system),
            lambda: set_system(""),
            bool(system),
        )

    # -- presets ---------------------------------------------------------------------------------

    def _save_preset(self, name: str) -> None:
        """Save this conversation's settings by name."""
        self._presets.save(Preset(name.strip(), self._state.conversation.system, self._options))

    def _save_row(self) -> _Row:
        help = "Save the system prompt and the options of this conversation under a name."

        def change() -> None:
            question = Content.assemble(("Name of the preset", HEADING), f"\n{help}")
            ask(self, Ask(question, "", self._save_preset), lambda name: self._fill())

        return _Row("Save as a preset", "…", help, change)

    def _preset_row(self, preset: Preset) -> _Row:
        name, file = preset.name, self._presets.path or "presets.toml"

        def use() -> None:
            self._try(lambda: self._session.use(preset), f"This conversation uses {name}")

        def replace() -> None:
            self._try(lambda: self._save_preset(name), f"{name} is replaced")

        def delete() -> None:
            def forget() -> None:
                self._presets.replace_table(name, None)

            question = Confirm(f"Delete the preset {name}?", "delete")
            ask(self, question, lambda yes: self._try(forget, f"{name} is deleted"))

        choices = {
            "Use it in this conversation": use,
            "Replace it with this conversation's settings": replace,
            "Delete it": delete,
        }
        dialog = [(each, each) for each in choices]
        return _Row(
            name,
            preset.summary,
            f"Enter uses, replaces or deletes it. It is stored in {file}.",
            lambda: ask(self, Choose(name, dialog), lambda chosen: choices[chosen]()),
        )

    # -- new conversations -----------------------------------------------------------------------

    def _new_rows(self) -> list[_Row]:
        def begin(defaults: Defaults) -> None:
            self._preferences.remember_options(defaults.options)
            self._preferences.change({"system": defaults.system})
            self._state.defaults = defaults

        def row(name: str, help: str, defaults: Callable[[], Defaults]) -> _Row:
            done = f"New conversations {name[0].lower()}{name[1:]}"
            return _Row(
                name,
                "",
                f"New conversations begin with {help}.",
                lambda: self._try(lambda: begin(defaults()), done),
            )

        these = "the options and system prompt of this one"
        here = self._state.conversation
        return [
            row("Begin with these", these, lambda: Defaults(here.system, self._options)),
            row("Begin with defaults", "the model's own defaults", Defaults),
        ]

    # -- the app ---------------------------------------------------------------------------------

    def _theme_row(self) -> _Row:
        def change() -> None:
            theme = PickTheme(self.app)
            ask(self, theme, lambda n: self._try(lambda: self._preferences.change({"theme": n})))

        return _Row("Theme", self.app.theme, "Colours; the highlighted theme is shown.", change)

    def _panel_row(self) -> _Row:
        def change() -> None:
            self._panel = not self._panel
            self._show_panel(self._panel)
            self._fill()

        return _Row(
            "Live panel",
            "open" if self._panel else "closed",
            "Memory, disk, the pipeline, and what limits the speed.",
            change,
        )

    # -- events ----------------------------------------------------------------------------

    @property
    def _current(self) -> _Row | None:
        place = self._list.highlighted
        row = self._rows[place] if place is not None and place < len(self._rows) else None
        return row if isinstance(row, _Row) else None

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if (row := self._current) is not None:
            self._help.update(row.help)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if (row := self._current) is not None:
            row.change()

    def action_reset(self) -> None:
        if (row := self._current) is not None and row.reset is not None:
            row.reset()

    def _try(self, change: Callable[[], object], done: str = "") -> None:
        try:
            change()
        except LocalrtError as error:
            self.notify(one_line(error), severity="error", markup=False)
            return
        self._fill()
        if done:
            self.notify(done, markup=False)


class PickTheme(Choose):
    """A theme by name; moving previews it, Esc restores the old one."""

    def __init__(self, app: App[None]) -> None:
        names = offered(app)
        keys = "Enter save · Esc cancel"
        title = Content.styled("Theme", HEADING)
        super().__init__(title, [(name, name) for name in names], keys=keys, tall=True)
        self._before = app.theme
        self._place = names.index(app.theme) if app.theme in names else 0

    def on_mount(self) -> None:
        self.rows.highlighted = self._place

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option.id is not None:
            self.app.theme = event.option.id

    def action_leave(self) -> None:
        self.app.theme = self._before
        super().action_leave()


def _drawn(row: _Row, width: int) -> Content:
    name, value = clean(row.name), clean(row.value)
    value = value if len(value) <= _VALUE_WIDTH else f"{value[: _VALUE_WIDTH - 1]}…"
    drawn = Content.assemble(
        ("  " + name + " " * max(_NAME_WIDTH - len(name), 2), ""),
        (value, "bold $text-accent" if row.chosen else FAINT),
    )
    return hanging(drawn, width, 4)
