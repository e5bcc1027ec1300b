"""Where the user writes: Enter sends, Ctrl+J breaks the line, Up and Down walk the history.

The menu above it lists completions of a command or a file name; it never has the focus. A message
can also be edited in the user's own editor. The app decides whether a message can be sent now.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Key, Paste
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.text_area import Selection

from localrt import system
from localrt.common.errors import LocalrtError, OptionError, reason_of
from localrt.common.files import write_text
from localrt.common.processes import program_path
from localrt.tui.commands import Suggestion, as_typed, completion, read_line, suggestions
from localrt.tui.conversation.attachments import Attachments, SentMessage
from localrt.tui.inputs import TextArea
from localrt.tui.mentions import as_mention, dropped
from localrt.tui.themes import FAINT


class CommandMenu(OptionList, can_focus=False):
    """``show_for`` a text; hidden while nothing fits it."""

    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__(compact=True)
        self.items: list[Suggestion] = []
        self._text = ""
        self.display = False

    @property
    def is_open(self) -> bool:
        return bool(self.display) and len(self.items) > 0

    @property
    def chosen(self) -> Suggestion | None:
        return self.items[self.highlighted or 0] if self.is_open else None

    def show_for(self, text: str) -> None:
        if text == self._text:
            return  # the text it last showed, even if closed since
        self._text = text
        items = suggestions(text)
        if items == self.items and self.is_open == bool(items):
            return
        self.items, self.display = items, bool(items)
        width = max((len(item.label) for item in items), default=0) + 2
        self.set_options(
            Content.assemble(f"{item.label:<{width}}", (item.does, FAINT)) for item in items
        )
        self.highlighted = 0 if len(items) > 1 else None

    def close(self) -> None:
        """Hide until the text changes."""
        self.display = False


_NEWLINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter")


class Composer(TextArea):
    """A text area that grows to eight lines and remembers what was sent."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+underscore,alt+z", "undo", show=False, id="undo"),
        Binding("pageup", "screen.scroll_conversation('page_up')", show=False, id="page-up"),
        Binding("pagedown", "screen.scroll_conversation('page_down')", show=False, id="page-down"),
        Binding("ctrl+home", "screen.scroll_conversation('home')", show=False, id="to-top"),
        Binding("ctrl+end", "screen.scroll_conversation('end')", show=False, id="to-end"),
    ]

    @dataclass
    class Submitted(Message):
        """Enter was pressed on ``line``, which is not blank; attachments are still labels."""

        line: str

    class EnterOnEmpty(Message):
        """Enter was pressed in an empty composer."""

    def __init__(self, menu: CommandMenu) -> None:
        super().__init__(soft_wrap=True, tab_behavior="focus", highlight_cursor_line=False)
        self.attachments = Attachments()
        self._menu = menu
        self._messages: list[str] = []
        self._place = 0  # index into the history; the history's length means the current text
        self._draft = ""
        self._chord = False  # Ctrl+X was pressed

    def put(self, text: str) -> None:
        self.text = text
        self.move_cursor(self.document.end)

    def put_draft(self, draft: SentMessage) -> None:
        self.put(as_typed(self.attachments.folded(draft)))

    def put_before(self, text: str) -> None:
        """Put what was typed back before text written since."""
        if text:
            self.put("\n\n".join(filter(str.strip, (text, self.text))))

    def put_back(self, drafts: Iterable[SentMessage], *, select: bool = False) -> None:
        """Put unsent messages back before text written since; with ``select`` the next key replaces
        them.
        """
        back = "\n\n".join(as_typed(self.attachments.folded(draft)) for draft in drafts)
        self.put_before(back)
        if select:
            end = (back.count("\n"), len(back.rpartition("\n")[2]))
            self.selection = Selection((0, 0), end)

    def attach(self, label: str) -> None:
        """Put the label of a long text or a picture at the cursor."""
        line = self.document.get_line(self.cursor_location[0])[: self.cursor_location[1]]
        self.insert(("" if not line or line.endswith(" ") else " ") + label + " ")

    def remember(self, drafts: Iterable[SentMessage]) -> None:
        """Start the history of prompts with earlier messages."""
        self._messages = [as_typed(self.attachments.folded(draft)) for draft in drafts]
        self._place = len(self._messages)

    async def on_key(self, event: Key) -> None:
        chord, self._chord = self._chord, False
        if chord and event.key == "ctrl+e":
            await self.run_action("screen.editor")
        elif event.key == "ctrl+x" and self.selection.is_empty:
            self._chord = True  # Ctrl+E may follow, as in shells
        elif event.key == "enter":
            self._enter()
        elif event.key in _NEWLINE_KEYS:
            self.insert("\n")
        elif event.key == "tab":
            self._complete()
        elif event.key == "escape" and self._menu.is_open:
            self._menu.close()
        else:
            return
        event.stop()
        event.prevent_default()

    async def _on_paste(self, event: Paste) -> None:
        paths = " ".join(map(as_mention, dropped(event.text)))
        if paths or Attachments.is_long(event.text):
            event.prevent_default()
            event.stop()
            self.attach(paths or self.attachments.add("pasted", event.text))

    def update_suggestion(self) -> None:
        """Show the rest of a command in grey; Tab and Right take it."""
        self.suggestion = completion(self.text) if self._at_end else ""

    def action_cursor_up(self, select: bool = False) -> None:
        if self._choosing and not select:
            self._menu.action_cursor_up()
        elif not select and self.navigator.is_first_wrapped_line(self.cursor_location):
            self._walk(-1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if self._choosing and not select:
            self._menu.action_cursor_down()
        elif not select and self.navigator.is_last_wrapped_line(self.cursor_location):
            self._walk(+1)
        else:
            super().action_cursor_down(select)

    def action_delete_left(self) -> None:
        """Backspace; after a label it deletes the whole label."""
        row, column = self.cursor_location
        line = self.document.get_line(row)
        label = self.attachments.before(line, column) if self.selection.is_empty else ""
        if label and line[:column].endswith(label):
            self.delete((row, column - len(label)), (row, column))
        else:
            super().action_delete_left()

    def choose(self) -> None:
        if (chosen := self._menu.chosen) is not None:
            self.put(chosen.line)

    @property
    def _at_end(self) -> bool:
        return self.selection.is_empty and self.cursor_location == self.document.end

    @property
    def _choosing(self) -> bool:
        # While walking the history, a command may appear: the arrows must not move its menu.
        return (
            self._menu.is_open and len(self._menu.items) > 1 and self._place == len(self._messages)
        )

    def _complete(self) -> None:
        self._menu.show_for(self.text)  # keys may arrive before the change event
        row, column = self.cursor_location
        line = self.document.get_line(row)
        # A label is inserted with a space after it.
        label = self.attachments.before(line, len(line[:column].rstrip(" ")) or column)
        if label:
            start = line.rindex(label, 0, column + len(label))
            self.replace(self.attachments.text_of(label), (row, start), (row, start + len(label)))
        elif self._menu.is_open and self._at_end and self.text != "/":
            self.choose()
        elif self._at_end:
            self.insert(completion(self.text))

    def _enter(self) -> None:
        self._menu.show_for(self.text)
        chosen = self._menu.chosen
        line = read_line(self.text)
        if chosen is not None and isinstance(line, str) and self._takes_file(chosen):
            self.put(chosen.line)
            return
        if chosen is not None and not isinstance(line, str) and " " not in self.text.strip():
            entry = line.entry()
            if entry is None or self._menu.highlighted:  # incomplete, or another item is selected
                self.put(chosen.line)
                line = read_line(self.text)
                entry = None if isinstance(line, str) else line.entry()
                if entry is not None and entry.takes_argument:
                    return
        self._submit()

    def _takes_file(self, chosen: Suggestion) -> bool:
        """Whether Enter completes a file name: it is incomplete, or another item is selected."""
        if not self._at_end or chosen.line.rstrip() == self.text.rstrip():
            return False
        return bool(self._menu.highlighted) or not self.text.endswith("@")

    def _submit(self) -> None:
        text = self.text.strip()
        if not text:
            self.post_message(self.EnterOnEmpty())
            return
        if not self._messages or self._messages[-1] != text:
            self._messages.append(text)
        self._place = len(self._messages)
        self._draft = ""
        self.clear()
        self.post_message(self.Submitted(text))

    def _walk(self, step: int) -> None:
        place = self._place + step
        if not 0 <= place <= len(self._messages):
            return
        if self._place == len(self._messages):
            self._draft = self.text
        self._place = place
        self.put(self._draft if place == len(self._messages) else self._messages[place])
        if step < 0:
            self.move_cursor((0, 0))


_USUAL = (["nano"], ["vi"], ["notepad"])


def editor_command() -> list[str]:
    """The editor's command line.

    Raises:
        OptionError: there is none, or it cannot be found.
    """
    wanted = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    for command in [system.split(wanted)] if wanted else _USUAL:
        if command and (program := program_path(command[0])):
            return [program, *command[1:]]
    missing = f"the editor {wanted!r} is not there" if wanted else "no editor was found"
    raise OptionError(f"{missing}: set VISUAL or EDITOR")


def edited(text: str) -> str:
    """Edit a text in the user's editor and return it; the app must not be using the terminal.

    Raises:
        LocalrtError: the editor failed; the text is unchanged.
    """
    command = editor_command()
    with tempfile.TemporaryDirectory(prefix="localrt-") as folder:
        path = Path(folder) / "message.md"
        write_text(path, text, private=True, sync=False)
        try:
            status = subprocess.run([*command, str(path)], check=False).returncode
        except OSError as error:
            raise LocalrtError(f"cannot run {command[0]}: {reason_of(error)}") from error
        if status != 0:
            raise LocalrtError(f"{command[0]} ended with status {status}: the text is unchanged")
        return path.read_text(encoding="utf-8", errors="replace").rstrip("\n")
