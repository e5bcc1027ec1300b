"""Long texts in a message under a short label: pasted text and attached files.

While a message is written its attachments are labels in brackets; when it is sent each becomes its
text again, and where it lies is remembered, so that the conversation shows the label too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localrt.formatting import format_bytes
from localrt.tui.mentions import Mention

if TYPE_CHECKING:
    from localrt import Turn
    from localrt.tui.conversation.attached_files import AttachedFile

__all__ = [
    "Attachments",
    "Draft",
    "Fold",
    "draft_of",
    "read_folds",
]

_LONG_LINES = 10
_LONG_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Fold:
    """Characters ``start`` to ``end`` of a message, shown as ``label`` until unfolded."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A message as it is sent, and what of it is shown folded."""

    text: str
    folds: tuple[Fold, ...] = ()

    @property
    def info(self) -> dict[str, Any]:
        """What the history keeps with the text; ``draft_of`` reads it."""
        folds = [[fold.start, fold.end, fold.label] for fold in self.folds]
        return {"folds": folds} if folds else {}


class Attachments:
    """The labels of one composer, ``[notes.txt, 120 lines]``, and the text of each."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    @staticmethod
    def is_long(text: str) -> bool:
        """Whether pasted text is long enough for a label."""
        return text.count("\n") >= _LONG_LINES or len(text) >= _LONG_CHARACTERS

    def add(self, name: str, text: str, size: str = "") -> str:
        """The label for ``text``, to be put into the message; ``size`` is by default the text's."""
        if not size:
            lines = text.count("\n") + (not text.endswith("\n"))
            count = len(text.encode(errors="replace"))
            size = f"{lines} lines" if lines > 1 else format_bytes(count)
        label, number = f"[{name}, {size}]", 1
        while self._texts.get(label, text) != text:
            number += 1
            label = f"[{name} {number}, {size}]"
        self._texts[label] = text
        return label

    def add_file(self, file: AttachedFile) -> str:
        """The label for a file."""
        return self.add(file.name, file.text, file.size)

    def text_of(self, label: str) -> str:
        """The text of a label."""
        return self._texts[label]

    def before(self, line: str, column: int) -> str:
        """The label that ends at ``column`` of a line, or that it is in; empty for none."""
        for match in self._found(line):
            if match.start() < column <= match.end():
                return match.group()
        return ""

    def expanded(self, text: str) -> Draft:
        """The message with the text of every label in its place."""
        pieces: list[str] = []
        folds: list[Fold] = []
        place = length = 0
        for match in self._found(text):
            inside = self._texts[match.group()]
            before = text[place : match.start()]
            start = length + len(before)
            length = start + len(inside)
            pieces += [before, inside]
            folds.append(Fold(start, length, match.group()[1:-1]))
            place = match.end()
        return Draft("".join([*pieces, text[place:]]), tuple(folds))

    def labelled(self, text: str, read: Iterable[tuple[Mention, AttachedFile]]) -> str:
        """The message with a label in the place of each file that it names (``read_mentioned``)."""
        pieces: list[str] = []
        place = 0
        for mention, file in read:
            pieces += [text[place : mention.start], self.add_file(file)]
            place = mention.end
        return "".join([*pieces, text[place:]])

    def folded(self, draft: Draft) -> str:
        """A sent message as it was written, its folds as labels again; other text may have the
        same label by now.
        """
        pieces: list[str] = []
        place = 0
        for fold in draft.folds:
            name, _, size = fold.label.rpartition(", ")
            label = self.add(name or "text", draft.text[fold.start : fold.end], size)
            pieces += [draft.text[place : fold.start], label]
            place = fold.end
        return "".join([*pieces, draft.text[place:]])

    def _found(self, text: str) -> Iterable[re.Match[str]]:
        if not self._texts or "[" not in text:
            return ()
        names = sorted(self._texts, key=len, reverse=True)
        return re.finditer("|".join(map(re.escape, names)), text)


def draft_of(turn: Turn) -> Draft:
    """A user's turn as it was written."""
    return Draft(turn.content, read_folds(turn.info.get("folds"), len(turn.content)))


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
