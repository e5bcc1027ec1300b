"""The settings screen: options with their help, system prompt, presets, theme, panel, keys.

A list to walk through; Enter changes a row, Delete takes its default again, and what is wrong is
said where it was typed. What changes where is ``settings_work.py``'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localrt.errors import LocalrtError
from localrt.tui.dialogs import Choose, Confirm
from localrt.tui.presets import Preset
from localrt.tui.settings_dialogs import Edit, EditText, PickTheme
from localrt.tui.settings_work import OPTION_HELP, SettingsWork
from localrt.tui.text import clean, one_line

__all__ = ["SettingsScreen"]

_FAINT = "$foreground 60%"
_HEADING = "$text-primary bold"
_NAME_WIDTH = 22
_VALUE_WIDTH = 36


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the list: what it is called, says and is for; what Enter and Delete do."""

    name: str
    value: str
    help: str
    change: Callable[[], None]
    reset: Callable[[], None] | None = None
    chosen: bool = False  # by the user: drawn bold


class SettingsScreen(ModalScreen[None]):
    """``keys`` are (what it does, key) pairs to show; ``panel`` says whether the panel is open."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss(None)", show=False),
        Binding("delete,backspace", "reset", show=False),
    ]
    DEFAULT_CSS = """
    SettingsScreen #help { height: 3; margin: 1 0 0 0; color: $text-muted; }
    """

    def __init__(
        self,
        work: SettingsWork,
        *,
        keys: Mapping[str, str] | None = None,
        panel: bool = False,
        show_panel: Callable[[bool], None] = lambda open: None,
    ) -> None:
        super().__init__()
        self._work = work
        self._keys = keys or {}
        self._panel = panel
        self._show_panel = show_panel
        self._rows: list[_Row | str] = []

    def compose(self) -> ComposeResult:
        """List, help of the highlighted row, what the keys do."""
        with Vertical(classes="window tall"):
            yield OptionList(compact=True)
            yield Static(id="help", markup=False)
            yield Static("Enter change · Del default · Esc back", classes="keys", markup=False)

    def on_mount(self) -> None:
        """Show what there is."""
        self._fill()
        self.query_one(OptionList).focus()

    # -- rows ------------------------------------------------------------------------------------

    def _fill(self) -> None:
        options = self.query_one(OptionList)
        keep = options.highlighted
        self._rows = [
            "App",
            self._theme_row(),
            self._panel_row(),
            "Presets",
            *(self._preset_row(preset) for preset in self._work.presets.list()),
            self._save_row(),
            "This conversation",
            self._system_row(),
            *(self._option_row(name) for name in OPTION_HELP),
            "New conversations",
            *self._new_rows(),
            f"Keys (change them in {self._work.file.path}, [keys])",
            *(self._key_row(does, key) for does, key in self._keys.items()),
        ]
        options.clear_options()
        options.add_options(
            Option(Content.styled(row, _HEADING), disabled=True)
            if isinstance(row, str)
            else Option(_drawn(row))
            for row in self._rows
        )
        options.highlighted = 1 if keep is None else min(keep, len(self._rows) - 1)
        for note in self._work.presets.notes:
            self._say(note)

    def _system_row(self) -> _Row:
        work = self._work

        def change() -> None:
            self.app.push_screen(EditText("System prompt", work.system), taken)

        def taken(text: str | None) -> None:
            if text is not None:
                self._try(lambda: work.set_system(text))

        return _Row(
            "System prompt",
            " ".join(work.system.split()) or "none",
            "What the model is told before everything else. It changes the whole answer.",
            change,
            lambda: self._try(lambda: work.set_system("")),
            bool(work.system),
        )

    def _option_row(self, name: str) -> _Row:
        work = self._work
        chosen, default = work.options.get(name), work.default(name)
        if chosen is not None:
            value = _said(chosen)
        else:
            value = "–" if default is None else f"{_said(default)} (default)"

        def change() -> None:
            said = "" if chosen is None else _said(chosen)
            self.app.push_screen(
                Edit(name, OPTION_HELP[name], said, lambda t: work.set(name, t)), done
            )

        def done(changed: bool | None) -> None:
            if changed:
                self._fill()

        return _Row(
            name,
            value,
            OPTION_HELP[name],
            change,
            lambda: self._try(lambda: work.set(name, "none")),
            chosen is not None,
        )

    def _preset_row(self, preset: Preset) -> _Row:
        work = self._work

        def change() -> None:
            self.app.push_screen(
                Choose(
                    preset.name,
                    [
                        ("use", "Use it in this conversation"),
                        ("save", "Replace it by what this conversation has"),
                        ("delete", "Delete it"),
                    ],
                ),
                chosen,
            )

        def chosen(what: str | None) -> None:
            if what == "use":
                self._try(lambda: work.use(preset), f"This conversation uses {preset.name}")
            elif what == "save":
                self._try(lambda: work.save(preset.name), f"{preset.name} is replaced")
            elif what == "delete":
                self.app.push_screen(Confirm(f"Delete the preset {preset.name}?", "delete"), sure)

        def sure(yes: bool | None) -> None:
            if yes:
                self._try(lambda: work.presets.delete(preset.name), f"{preset.name} is deleted")

        return _Row(
            clean(preset.name),
            clean(preset.summary),
            f"Enter uses, replaces or deletes it. It lies in {work.presets.path}.",
            change,
        )

    def _save_row(self) -> _Row:
        work = self._work
        help = "Keep the system prompt and the options of this conversation under a name."

        def change() -> None:
            self.app.push_screen(Edit("Name of the preset", help, "", work.save), done)

        def done(changed: bool | None) -> None:
            if changed:
                self._fill()

        return _Row("Save as a preset", "…", help, change)

    def _new_rows(self) -> list[_Row]:
        work = self._work
        return [
            _Row(
                "Begin with these",
                "",
                "New conversations begin with the options and system prompt of this one.",
                lambda: self._try(work.begin_with_these, "New conversations begin with these"),
            ),
            _Row(
                "Begin plainly",
                "",
                "New conversations begin with the model's own defaults.",
                lambda: self._try(work.begin_plainly, "New conversations begin plainly"),
            ),
        ]

    def _theme_row(self) -> _Row:
        def change() -> None:
            self.app.push_screen(PickTheme(), chosen)

        def chosen(name: str | None) -> None:
            if name is not None:
                self._try(lambda: self._work.file.remember(theme=name))
            self._fill()

        return _Row("Theme", self.app.theme, "Colours; they are shown as you walk.", change)

    def _panel_row(self) -> _Row:
        def change() -> None:
            self._panel = not self._panel
            self._show_panel(self._panel)
            self._fill()

        return _Row(
            "Live panel",
            "open" if self._panel else "closed",
            "Memory, disk, the pipeline, and why it is not faster.",
            change,
        )

    def _key_row(self, does: str, key: str) -> _Row:
        help = f'In {self._work.file.path}, below [keys], an action\'s name = "ctrl+l" changes it.'
        return _Row(does, key, help, lambda: None)

    # -- what happens ----------------------------------------------------------------------------

    @property
    def _current(self) -> _Row | None:
        place = self.query_one(OptionList).highlighted
        row = self._rows[place] if place is not None and place < len(self._rows) else None
        return row if isinstance(row, _Row) else None

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Say what the row is for."""
        if (row := self._current) is not None:
            self.query_one("#help", Static).update(row.help)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or a click changes it."""
        if (row := self._current) is not None:
            row.change()

    def action_reset(self) -> None:
        """Delete takes the default again."""
        if (row := self._current) is not None and row.reset is not None:
            row.reset()

    def _try(self, change: Callable[[], None], said: str = "") -> None:
        try:
            change()
        except LocalrtError as error:
            self._say(one_line(error), error=True)
            return
        self._fill()
        if said:
            self._say(said)

    def _say(self, text: str, *, error: bool = False) -> None:
        self.notify(text, severity="error" if error else "information", markup=False)


def _drawn(row: _Row) -> Content:
    value = row.value if len(row.value) <= _VALUE_WIDTH else f"{row.value[: _VALUE_WIDTH - 1]}…"
    return Content.assemble(
        (f"  {row.name:<{_NAME_WIDTH}}", ""),
        (value, "bold $text-accent" if row.chosen else _FAINT),
    )


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
