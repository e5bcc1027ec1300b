"""Attachments of a message, shown as short labels: long pasted texts, files and pictures.

While a message is written, its attachments are labels in brackets; when it is sent, each is
replaced by its text or picture, and its place is kept, so that the conversation shows the label
too.

The model gets text in a fence under the file's name, and a picture as it is. Users see a picture's
caption and a thumbnail. Knows no widget.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.common.errors import OptionError, StorageError
from localrt.common.files import read_bytes, user_path
from localrt.common.formatting import format_bytes
from localrt.documents.index import fitted
from localrt.documents.kinds import Page
from localrt.documents.reading import Document, read_document
from localrt.history.pictures import (
    LARGEST_PICTURE,
    joined_content,
    new_picture,
    read_picture,
    small_image,
)
from localrt.tui.mentions import PICTURES, Mention, mentions
from localrt.tui.text import clean

if TYPE_CHECKING:
    from localrt import KeptPicture, Turn
    from localrt.common.progress import ProgressCallback

_LONG_LINES = 10
_LONG_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Fold:
    """Characters ``start`` to ``end`` of a message, shown as ``label`` until unfolded."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message as sent, with the places of its folded parts and its pictures."""

    text: str
    folds: tuple[Fold, ...] = ()
    pictures: tuple[KeptPicture, ...] = ()
    tokens: tuple[int, ...] = ()  # token counts of the pictures, if known

    @property
    def content(self) -> str | Sequence[Mapping[str, Any]]:
        """Text, or the content parts of a message with pictures."""
        return joined_content(
            self.text, self.pictures, lambda each: {"type": "image", "image": each}
        )

    @property
    def info(self) -> dict[str, Any]:
        """The data that the history stores with the text; ``draft_of`` reads it."""
        folds = [[fold.start, fold.end, fold.label] for fold in self.folds]
        kept = {"folds": folds, "picture_tokens": list(self.tokens)}
        return {name: values for name, values in kept.items() if values}

    @property
    def captions(self) -> list[str]:
        """A line for each picture."""
        unknown = [0] * len(self.pictures)
        tokens = self.tokens if len(self.tokens) == len(unknown) else unknown
        return [caption(*each) for each in zip(self.pictures, tokens, strict=True)]


class Attachments:
    """A composer's labels, such as ``[notes.txt, 120 lines]``, each with its text or picture."""

    def __init__(self, embedder: Callable[[], Any] | None = None) -> None:
        self.embedder = embedder  # opens a model to search files with
        self._texts: dict[str, str] = {}
        self._pictures: dict[str, KeptPicture] = {}
        self._files: dict[str, Document] = {}

    @staticmethod
    def is_long(text: str) -> bool:
        """Whether pasted text is long enough for a label."""
        return text.count("\n") >= _LONG_LINES or len(text) >= _LONG_CHARACTERS

    def add(self, name: str, text: str, size: str = "") -> str:
        """Create the label for ``text`` in the message; ``size`` is by default the text's."""
        if not size:
            lines = text.count("\n") + (not text.endswith("\n"))
            count = len(text.encode(errors="replace"))
            size = f"{lines} lines" if lines > 1 else format_bytes(count)
        label, number = f"[{name}, {size}]", 1
        while label in self._pictures or self._texts.get(label, text) != text:
            number += 1
            label = f"[{name} {number}, {size}]"
        self._texts[label] = text
        return label

    def add_picture(self, picture: KeptPicture) -> str:
        label, number = f"[{caption(picture)}]", 1
        while label in self._texts or self._pictures.get(label, picture).digest != picture.digest:
            number += 1
            label = f"[{number}: {caption(picture)}]"
        self._pictures[label] = picture
        return label

    def add_file(self, file: Document) -> str:
        """The label of a file, and those of its pages that are pictures."""
        labels = []
        if file.size:
            labels = [self.add(file.name, file.text, file.size)]
            self._files[labels[0]] = file
        for page in file.pictures:
            name = f"{file.name} page {page.number}" if page.number else file.name
            labels.append(self.add_picture(new_picture(page.picture, name=name)))
        return " ".join(labels)

    def holds_files(self, text: str) -> bool:
        """Whether the message has files that may not fit."""
        return any(each[0] in self._files for each in self._labels_in(text))

    def fitted(
        self,
        text: str,
        progress: ProgressCallback,
        free: Callable[[], int] = lambda: 0,
        count: Callable[[str], int] = len,
        *,
        keep: bool = True,
    ) -> tuple[str, list[str]]:
        """The message with pieces of files that do not fit (``documents.fitted``), and notes."""
        found = list(self._labels_in(text))
        question = _replaced(text, [(*each.span(), "") for each in found])
        read = {label: self._files[label] for each in found if (label := each[0]) in self._files}
        files = list(read.values())
        how: dict[str, Any] = {"progress": progress, "embedder": self.embedder, "keep": keep}
        shown = fitted(files, question, free=free, count=count, **how)
        changed = [(*each, new) for each, new in zip(read.items(), shown, strict=True)]
        for label, file, new in changed:
            text = text.replace(label, self.add_file(new)) if new is not file else text
        return text, [new.note for _, file, new in changed if new is not file]

    def text_of(self, label: str) -> str:
        """The text with which Tab replaces a label; for a picture, the label itself."""
        return self._texts.get(label, label)

    def before(self, line: str, column: int) -> str:
        """The label that ends at or contains ``column`` of a line; empty for none."""
        labels = (each for each in self._labels_in(line) if each.start() < column <= each.end())
        return next((each.group() for each in labels), "")

    def expanded(self, text: str) -> SentMessage:
        """The message with every label replaced by its text or picture."""
        pieces: list[str] = []
        folds: list[Fold] = []
        pictures: list[KeptPicture] = []
        place = length = 0
        for match in self._labels_in(text):
            label = match.group()
            inside = self._texts.get(label, "")
            before = text[place : match.start()]
            start = length + len(before)
            length = start + len(inside)
            pieces += [before, inside]
            if label in self._pictures:
                pictures.append(replace(self._pictures[label], place=start))
            else:
                folds.append(Fold(start, length, label[1:-1]))
            place = match.end()
        return SentMessage("".join([*pieces, text[place:]]), tuple(folds), tuple(pictures))

    def unfolded(self, text: str) -> str:
        """The message with every label replaced by its text, except those of pictures."""
        labels = self._labels_in(text)
        return _replaced(text, [(*each.span(), self.text_of(each.group())) for each in labels])

    def labelled(self, text: str, files: Iterable[tuple[Mention, Document]]) -> str:
        """The message with each file name (``read_mentioned``) replaced by a label."""
        labels = [(mention.start, mention.end, self.add_file(file)) for mention, file in files]
        return _replaced(text, labels)

    def folded(self, draft: SentMessage) -> str:
        """A sent message as it was written, with folds and pictures as labels again. Labels may be
        numbered differently, since other texts may have them by now.
        """
        labels = [(each.place, each.place, self.add_picture(each)) for each in draft.pictures]
        for fold in draft.folds:
            name, _, size = fold.label.rpartition(", ")
            label = self.add(name or "text", draft.text[fold.start : fold.end], size)
            labels.append((fold.start, fold.end, label))
        return _replaced(draft.text, sorted(labels, key=lambda each: each[:2]))

    def _labels_in(self, text: str) -> Iterable[re.Match[str]]:
        names = sorted([*self._texts, *self._pictures], key=len, reverse=True)
        return re.finditer("|".join(map(re.escape, names)), text) if names else ()


def _replaced(text: str, places: Iterable[tuple[int, int, str]]) -> str:
    """The text with replacements, as (start, end, new text) in order."""
    pieces, last = [], 0
    for start, end, other in places:
        pieces += [text[last:start], other]
        last = end
    return "".join([*pieces, text[last:]])


def draft_of(turn: Turn) -> SentMessage:
    """A user's turn as it was written."""
    folds = read_folds(turn.info.get("folds"), len(turn.content))
    tokens = turn.info.get("picture_tokens")
    if not isinstance(tokens, list) or not all(isinstance(each, int) for each in tokens):
        tokens = []
    return SentMessage(turn.content, folds, turn.pictures, tuple(tokens))


def read_folds(value: object, length: int) -> tuple[Fold, ...]:
    """The folds in a turn's ``info``, without invalid ones."""
    folds: list[Fold] = []
    for item in value if isinstance(value, list) else []:
        try:
            start, end, label = item
            if (folds[-1].end if folds else 0) <= start < end <= length:
                folds.append(Fold(int(start), int(end), str(label)))
        except (TypeError, ValueError):
            continue
    return tuple(folds)


_NO_PATH = "/attach PATH takes a document, text file, picture or folder"


def read_attachment(
    argument: str, progress: ProgressCallback | None = None, *, sees: bool = False
) -> Document:
    """A file or folder to attach; without a path, the clipboard's picture. Its name is the path as
    written, or the end of an absolute one. ``sees``: pages without text are pictures.

    Raises:
        OptionError: there is no file, or it is too large or cannot be read as text.
        StorageError: it cannot be read.
    """
    if not argument:
        return _in_clipboard()
    path = user_path(argument.strip("'\""))
    name = clean(path.name if path.is_absolute() else path.as_posix()).replace("\n", " ")
    if path.suffix.lower() in PICTURES:
        return _picture(path)
    return read_document(path, name=name, pictures=sees, progress=progress)


def read_mentioned(
    text: str, progress: ProgressCallback, *, sees: bool = False
) -> list[tuple[Mention, Document]]:
    """The files and folders that a message names.

    Raises:
        StorageError: one is not there, or cannot be attached.
    """
    files = []
    for mention in mentions(text):
        try:
            files.append((mention, read_attachment(mention.path, progress, sees=sees)))
        except (OptionError, StorageError) as error:
            name = text[mention.start : mention.end]
            raise StorageError(f"{error}; `{name}` in backticks is sent as text") from error
    return files


def _picture(path: Path) -> Document:
    data = read_bytes(path, LARGEST_PICTURE)
    picture = new_picture(data, name=clean(path.name).replace("\n", " "))
    small_image(picture, 1, 1)  # reports a damaged picture before it is sent
    return Document(picture.name, "", "", pictures=(Page("", 0, data),))


def _in_clipboard() -> Document:
    """The picture, or the copied file, in the clipboard of this machine."""
    from PIL import ImageGrab, UnidentifiedImageError

    try:
        image = ImageGrab.grabclipboard()
    except UnidentifiedImageError:  # some tools return copied text
        image = None
    except Exception as error:  # no tool, no display, or what Pillow's decoders raise
        raise OptionError(f"the clipboard cannot be read ({error}): {_NO_PATH}") from error
    if isinstance(image, list) and image:
        return read_attachment(str(image[0]))
    if image is None or isinstance(image, list):
        raise OptionError(f"there is no picture in the clipboard: {_NO_PATH}")
    name = f"clipboard-{datetime.now():%H%M%S}.png"
    return Document(name, "", "", pictures=(Page("", 0, read_picture(image).data),))


def caption(picture: KeptPicture, tokens: int = 0) -> str:
    """``photo.png, 640 x 480, 256 tokens``; 0 means unknown."""
    size = f"{clean(picture.name)}, {picture.width:,} x {picture.height:,}"
    return f"{size}, {tokens:,} tokens" if tokens else size
