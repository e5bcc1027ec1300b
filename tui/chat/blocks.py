"""What a conversation is made of on screen: blocks that lay themselves out when they are looked at.

A block knows its text, its lines at one width, and a cheap guess of their number for as long as
nobody has looked. It knows neither the widget that shows it nor the other blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from localrt.common.option_names import spelled
from localrt.tui.chat.markdown_rules import breakable_text, without_marks
from localrt.tui.chat.styles import Styles
from localrt.tui.commands import in_app
from localrt.tui.conversation.attachments import Fold
from localrt.tui.text import clean

GUTTER = 3  # columns on the left that belong to no text, a margin among them

Kind = Literal["info", "error", "mark"]


class Block:
    """A part of the conversation. Subclasses say what it consists of.

    ``turn`` is its number in the history, None for what is no turn. ``branch`` of ``branches`` are
    the turns in its place.
    """

    role = ""
    gap = 1  # empty lines above it

    def __init__(self) -> None:
        self.turn: int | None = None
        self.branch = self.branches = 1
        self.mark = ""  # how it ended, when that is worth a word
        self._width = -1
        self._styles: Styles | None = None
        self._lines: list[Strip] | None = None
        self._height: int | None = None

    # -- for the view ----------------------------------------------------------------------------

    def lines(self, width: int, styles: Styles) -> list[Strip]:
        """The lines in ``width`` columns, gutter excluded."""
        if self._lines is None or width != self._width or styles is not self._styles:
            self._width, self._styles = width, styles
            self._lines = self.lay_out(width, styles)
            self._height = len(self._lines)
        return self._lines

    def height(self, width: int) -> tuple[int, bool]:
        """The number of lines, and whether that was counted or guessed."""
        if self._height is not None and width == self._width:
            return self._height, True
        return self.estimate(width), False

    @property
    def laid_out(self) -> bool:
        """Whether the lines are kept."""
        return self._lines is not None

    def forget(self) -> None:
        """Give the lines back; their number stays known."""
        self._lines = None

    def changed(self) -> None:
        """Lay out again at the next look."""
        self._lines = self._height = None

    def gutter(self, styles: Styles, marked: bool) -> Segment:
        """The columns on the left of every line."""
        return Segment("┃ ", styles.marked_bar) if marked else Segment("  ")

    def background(self, styles: Styles) -> Style:
        """What lies behind the lines."""
        return styles.base

    @property
    def foldable(self) -> bool:
        """Whether ``toggle`` does anything."""
        return False

    def toggle(self) -> None:
        """Fold or unfold what can be."""

    # -- for subclasses --------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """The text as written: what copying gives."""
        raise NotImplementedError

    @property
    def readable(self) -> str:
        """About the text that the lines show: without what is folded."""
        return self.source

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        """The lines in ``width`` columns."""
        raise NotImplementedError

    def estimate(self, width: int) -> int:
        """A cheap guess of the number of lines."""
        return estimated(self.source, width) + bool(self.note)

    @property
    def note(self) -> str:
        """``2/3 · stopped``: the small line below; empty for none."""
        branch = f"{self.branch}/{self.branches}" if self.branches > 1 else ""
        return " · ".join(part for part in (branch, self.mark) if part)

    def note_lines(self, width: int, styles: Styles) -> list[Strip]:
        """The small line, if any."""
        return wrapped(Text(self.note, styles.mark), width, styles) if self.note else []


class UserTurn(Block):
    """What the person wrote, as written; ``waiting`` until it is sent."""

    role = "user"

    def __init__(self, text: str, *, waiting: bool = False, folds: Sequence[Fold] = ()) -> None:
        super().__init__()
        self.message = text
        self.waiting = waiting
        self.folds = tuple(folds)
        self._unfolded = False

    @property
    def source(self) -> str:
        """The message, with everything that is folded."""
        return self.message

    @property
    def foldable(self) -> bool:
        """Whether something long is shown by name."""
        return bool(self.folds)

    def toggle(self) -> None:
        """Show what is folded, or its name again."""
        self._unfolded = not self._unfolded
        self.changed()

    def gutter(self, styles: Styles, marked: bool) -> Segment:
        """A bar in the person's colour."""
        if marked:
            return Segment("┃ ", styles.user + styles.marked_bar)
        if self.waiting:
            return Segment("▌ ", styles.waiting + styles.waiting_bar)
        return Segment("▌ ", styles.user + styles.bar)

    def background(self, styles: Styles) -> Style:
        """A person's words stand on their own background."""
        return styles.waiting if self.waiting else styles.user

    def shown(self, styles: Styles | None = None) -> Text:
        """The message with its folds by name."""
        text, place = Text(), 0
        for fold in () if self._unfolded else self.folds:
            text.append(clean(self.message[place : fold.start]))
            text.append(f"▸ {clean(fold.label)}", styles.attachment if styles else None)
            place = fold.end
        return text.append(clean(self.message[place:]))

    @property
    def readable(self) -> str:
        """As shown."""
        return self.shown().plain

    def estimate(self, width: int) -> int:
        """From the text that is shown."""
        return estimated(self.readable, width) + bool(self.note)

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        """Wrapped, a column free on the right."""
        return [*wrapped(self.shown(styles), width - 1, styles), *self.note_lines(width, styles)]


class Notice(Block):
    """A line of the app itself: information, an error, or a mark below an answer."""

    def __init__(self, text: str, kind: Kind = "info") -> None:
        super().__init__()
        self.text = clean(spelled(text, in_app))
        self.kind = kind
        self.gap = 0 if kind == "mark" else 1
        self._times = 1

    @property
    def source(self) -> str:
        """The line, and how often in a row it was said."""
        return self.text if self._times == 1 else f"{self.text} ({self._times} times)"

    def said_again(self) -> None:
        """The same once more: it is counted, not repeated below itself."""
        self._times += 1
        self.changed()

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        """Wrapped, in the colour of its kind."""
        style = {"info": styles.notice, "error": styles.error, "mark": styles.mark}[self.kind]
        return wrapped(Text(self.source, style), width, styles)


def wrapped(text: Text, width: int, styles: Styles) -> list[Strip]:
    """Text as lines of at most ``width`` columns; at least one."""
    text.expand_tabs(4)
    text.stylize_before(text.style)  # Rich leaves a text's own style to whoever prints it
    lines = breakable_text(text).wrap(styles.console, max(width, 4), overflow="fold")
    rows = (without_marks(line.render(styles.console)) for line in lines)
    return [Strip([s for s in row if s.text]) for row in rows] or [Strip([])]


def estimated(text: str, width: int) -> int:
    """A cheap guess of the lines that text takes."""
    width = max(width, 8)
    return max(sum(1 + len(line) // width for line in text.split("\n")), 1)
