"""What a conversation is made of on screen: blocks that lay themselves out when they are looked at.

A block knows its text, its lines at one width, and a cheap guess of their number for as long as
nobody has looked. It knows neither the widget that shows it nor the other blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from localrt.tui.looks import Looks
from localrt.tui.text import clean

__all__ = ["GUTTER", "Block", "Fold", "Kind", "Notice", "UserTurn", "read_folds", "wrapped"]

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
        self._looks: Looks | None = None
        self._lines: list[Strip] | None = None
        self._height: int | None = None

    # -- for the view ----------------------------------------------------------------------------

    def lines(self, width: int, looks: Looks) -> list[Strip]:
        """The lines in ``width`` columns, gutter excluded."""
        if self._lines is None or width != self._width or looks is not self._looks:
            self._width, self._looks = width, looks
            self._lines = self.lay_out(width, looks)
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

    def gutter(self, looks: Looks, marked: bool) -> Segment:
        """The columns on the left of every line."""
        return Segment("┃ ", looks.marked_bar) if marked else Segment("  ")

    def background(self, looks: Looks) -> Style:
        """What lies behind the lines."""
        return looks.base

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

    def lay_out(self, width: int, looks: Looks) -> list[Strip]:
        """The lines in ``width`` columns."""
        raise NotImplementedError

    def estimate(self, width: int) -> int:
        """A cheap guess of the number of lines."""
        return _estimate(self.source, width) + bool(self.note)

    @property
    def note(self) -> str:
        """``2/3 · stopped``: the small line below; empty for none."""
        branch = f"{self.branch}/{self.branches}" if self.branches > 1 else ""
        return " · ".join(part for part in (branch, self.mark) if part)

    def note_lines(self, width: int, looks: Looks) -> list[Strip]:
        """The small line, if any."""
        return wrapped(Text(self.note, looks.mark), width, looks) if self.note else []


@dataclass(frozen=True, slots=True)
class Fold:
    """Characters ``start`` to ``end`` of a message, shown as ``label`` until unfolded."""

    start: int
    end: int
    label: str


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

    def sent(self) -> None:
        """The message is on its way to the model."""
        self.waiting = False
        self.changed()

    def gutter(self, looks: Looks, marked: bool) -> Segment:
        """A bar in the person's colour."""
        if marked:
            return Segment("┃ ", looks.user + looks.marked_bar)
        if self.waiting:
            return Segment("▌ ", looks.waiting + looks.waiting_bar)
        return Segment("▌ ", looks.user + looks.bar)

    def background(self, looks: Looks) -> Style:
        """A person's words stand on their own background."""
        return looks.waiting if self.waiting else looks.user

    def shown(self, looks: Looks | None = None) -> Text:
        """The message with its folds by name."""
        text, place = Text(), 0
        for fold in () if self._unfolded else self.folds:
            text.append(clean(self.message[place : fold.start]))
            text.append(f"▸ {clean(fold.label)}", looks.chip if looks else None)
            place = fold.end
        return text.append(clean(self.message[place:]))

    def estimate(self, width: int) -> int:
        """From the text that is shown."""
        return _estimate(self.shown().plain, width) + bool(self.note)

    def lay_out(self, width: int, looks: Looks) -> list[Strip]:
        """Wrapped, a column free on the right."""
        return [*wrapped(self.shown(looks), width - 1, looks), *self.note_lines(width, looks)]


class Notice(Block):
    """A line of the app itself: information, an error, or a mark below an answer."""

    def __init__(self, text: str, kind: Kind = "info") -> None:
        super().__init__()
        self.text = clean(text)
        self.kind = kind
        self.gap = 0 if kind == "mark" else 1

    @property
    def source(self) -> str:
        """The line."""
        return self.text

    def lay_out(self, width: int, looks: Looks) -> list[Strip]:
        """Wrapped, in the colour of its kind."""
        style = {"info": looks.notice, "error": looks.error, "mark": looks.mark}[self.kind]
        return wrapped(Text(self.text, style), width, looks)


def read_folds(value: Any, length: int) -> tuple[Fold, ...]:
    """The folds that a turn's ``info`` holds, those that make no sense left out."""
    folds: list[Fold] = []
    for item in value if isinstance(value, list) else []:
        try:
            start, end, label = item
            if (folds[-1].end if folds else 0) <= start < end <= length:
                folds.append(Fold(int(start), int(end), str(label)))
        except (TypeError, ValueError):
            continue
    return tuple(folds)


def wrapped(text: Text, width: int, looks: Looks) -> list[Strip]:
    """Text as lines of at most ``width`` columns; at least one."""
    text.expand_tabs(4)
    text.stylize_before(text.style)  # Rich leaves a text's own style to whoever prints it
    lines = text.wrap(looks.console, max(width, 4), overflow="fold")
    return [Strip([s for s in line.render(looks.console) if s.text]) for line in lines] or [
        Strip([])
    ]


def _estimate(text: str, width: int) -> int:
    width = max(width, 8)
    return max(sum(1 + len(line) // width for line in text.split("\n")), 1)
