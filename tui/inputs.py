"""The app's text fields, and its lists: Textual's with fixes.

Keys act in the order in which they were pressed, every character can be typed, Backspace and the
arrows act on a whole letter or emoji, and control characters in the text are shown, never obeyed.
In a list that is not drawn yet, keys that move by a page do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Literal
from unicodedata import category

from textual import widgets
from textual.document._document import EditResult, Location
from textual.document._edit import Edit
from textual.events import Key
from textual.geometry import Offset
from textual.strip import Strip
from textual.widgets import OptionList

from localrt.tui.text import clean

if TYPE_CHECKING:
    from textual.widget import Widget
else:
    Widget = object  # not a widget at run time: styles come from the first base that is one

_JOINER = "\u200d"
_CONTINUES = (  # characters that continue a letter and are not combining marks
    *range(0x1160, 0x1200),  # vowels and ends of Hangul
    *(0x0E33, 0x0EB3),  # am of Thai and Lao
    *(0x200C, 0x200D),
    *range(0x1F3FB, 0x1F400),  # skin tones
    *range(0xE0020, 0xE0080),  # tags, of regional flags
)


def is_text(event: Key) -> bool:
    """Whether a key types its character: it is not a control character."""
    character = event.character or ""
    alone = len(character) == 1 and category(character) not in ("Cc", "Cs")
    return alone and not event.key.startswith(("alt+", "ctrl+"))


def _continues(text: str, place: int) -> bool:
    """Whether the character there belongs to the letter or emoji before it."""
    before, letter = text[place - 1], text[place]
    if category(letter).startswith("M") or ord(letter) in _CONTINUES:
        return True
    if _is_flag_letter(letter):  # two of them are a flag
        return sum(1 for _ in takewhile(_is_flag_letter, reversed(text[:place]))) % 2 == 1
    return before == _JOINER and letter > "\u2000"


def _is_flag_letter(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def letter_size(text: str, place: int, step: int) -> int:
    """The characters of the letter or emoji before (-1) or after (1) a place; 1 at the ends."""
    end = place + step
    while 0 < end < len(text) and _continues(text, end):
        end += step
    return abs(end - place)


class _Typed(Widget):
    """Base class of both kinds of fields."""

    def write(self, character: str) -> None:
        raise NotImplementedError

    async def _on_key(self, event: Key) -> None:
        """Textual ignores characters that Python calls unprintable, and handles a field's special
        keys after letters that were typed later.
        """
        if event.key.startswith("alt+"):
            event.prevent_default()  # the key event has a character that must not be inserted
            return
        if is_text(event):
            self.write(event.character or "")
        else:
            found = self._bindings.key_to_bindings.get(event.key, [])
            own = next((binding for binding in found if not binding.id), None)
            if own is None or not await self.app.run_action(own.action, self):
                return
        event.stop()
        event.prevent_default()


class TextArea(_Typed, widgets.TextArea):
    """Text of several lines."""

    def write(self, character: str) -> None:
        self._restart_blink()
        self.replace(character, *self.selection, maintain_selection_offset=False)

    def _set_document(self, text: str, language: str | None) -> None:
        super()._set_document(clean(text), language)

    def edit(self, edit: Edit) -> EditResult:
        edit.text = clean(edit.text)
        return super().edit(edit)

    def scroll_cursor_visible(self, *arguments: bool, **options: bool) -> Offset:
        """While an undo shortens the text, the cursor may still be below its end."""
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(*arguments, **options)

    def render_line(self, y: int) -> Strip:
        """Textual fails to wrap a placeholder in no columns, which a side panel may leave."""
        return super().render_line(y) if self.content_size.width else Strip.blank(0)

    def get_cursor_left_location(self) -> Location:
        return self._beside(super().get_cursor_left_location(), -1)

    def get_cursor_right_location(self) -> Location:
        return self._beside(super().get_cursor_right_location(), 1)

    def _beside(self, location: Location, step: int) -> Location:
        row, column = self.cursor_location
        if location[0] != row:  # in another line
            return location
        return row, column + step * letter_size(self.document.get_line(row), column, step)


class Input(_Typed, widgets.Input):
    """One line."""

    def write(self, character: str) -> None:
        self._restart_blink()
        self.replace(character, *self.selection)

    def validate_value(self, value: str) -> str:
        return clean(value)

    def _repeat(self, step: int, action: Callable[..., None], *select: bool) -> None:
        """Act on every character of a letter, or once on the selection."""
        once = not self.selection.is_empty and not any(select)
        for _ in range(1 if once else letter_size(self.value, self.cursor_position, step)):
            action(*select)

    def action_cursor_left(self, select: bool = False) -> None:
        self._repeat(-1, super().action_cursor_left, select)

    def action_cursor_right(self, select: bool = False) -> None:
        self._repeat(1, super().action_cursor_right, select)

    def action_delete_left(self) -> None:
        self._repeat(-1, super().action_delete_left)

    def action_delete_right(self) -> None:
        self._repeat(1, super().action_delete_right)


_move_page = OptionList._move_page


def _moved_page(options: OptionList, direction: Literal[-1, 1]) -> None:
    if options.scrollable_content_region:  # else Textual's does not know the options' lines
        _move_page(options, direction)


setattr(OptionList, "_move_page", _moved_page)  # noqa: B010 - in the command palette, too
