"""Long texts in a message under a short label: pasted text and attached files.

While a message is written its attachments are labels in brackets; when it is sent each becomes its
text again, and where it lies is remembered, so that the conversation shows the label too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.errors import LocalrtError, OptionError, StorageError
from localrt.formatting import format_bytes
from localrt.tui.mentions import Mention, mentions

if TYPE_CHECKING:
    from localrt import Turn

__all__ = [
    "LARGEST_FILE",
    "Attachments",
    "Draft",
    "Fold",
    "draft_of",
    "read_attachment",
    "read_folds",
    "read_mentioned",
]

LARGEST_FILE = 512_000  # bytes; more than that fills the context of most models
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

    def add(self, name: str, text: str) -> str:
        """The label for ``text``, to be put into the message."""
        lines = text.count("\n") + (not text.endswith("\n"))
        size = f"{lines} lines" if lines > 1 else format_bytes(len(text.encode(errors="replace")))
        label, number = f"[{name}, {size}]", 1
        while self._texts.get(label, text) != text:
            number += 1
            label = f"[{name} {number}, {size}]"
        self._texts[label] = text
        return label

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

    def labelled(self, text: str, read: Iterable[tuple[Mention, str, str]]) -> str:
        """The message with a label in the place of each file that it names (``read_mentioned``)."""
        pieces: list[str] = []
        place = 0
        for mention, name, content in read:
            pieces += [text[place : mention.start], self.add(name, content)]
            place = mention.end
        return "".join([*pieces, text[place:]])

    def folded(self, draft: Draft) -> str:
        """A sent message as it was written, its folds as labels again."""
        pieces: list[str] = []
        place = 0
        for fold in draft.folds:
            label = f"[{fold.label}]"
            self._texts[label] = draft.text[fold.start : fold.end]
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


def read_attachment(argument: str) -> tuple[str, str]:
    """Name and text of a file to attach, the text in a code fence under the name.

    Raises:
        OptionError: no path, a folder, too large, or not text.
        StorageError: the file cannot be read.
    """
    if not argument:
        raise OptionError("/attach needs the path of a text file")
    path = Path(argument.strip("'\"")).expanduser()
    try:
        if path.is_dir():
            raise OptionError(f"{path} is a folder: attach a file of it")
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is not a regular file")
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise OptionError(
                f"{path} has {format_bytes(size)}: attach at most {format_bytes(LARGEST_FILE)}, "
                "or the part that matters"
            )
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise OptionError(f"{path} is not a text file (UTF-8): only text can be attached")
    text = text.replace("\r\n", "\n")
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    body = text if text.endswith("\n") else text + "\n"
    return path.name, f"{path.name}:\n{fence}{path.suffix[1:]}\n{body}{fence}\n"


def read_mentioned(text: str) -> list[tuple[Mention, str, str]]:
    """The files that a message names, each with its name and text.

    Raises:
        StorageError: a file is not there, or cannot be attached.
    """
    found = []
    for mention in mentions(text):
        try:
            found.append((mention, *read_attachment(mention.path)))
        except LocalrtError as error:
            name = text[mention.start : mention.end]
            raise StorageError(f"{error}; `{name}` in backticks is sent as text") from error
    return found
