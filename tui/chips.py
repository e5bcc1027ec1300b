"""Long texts in a message under a short name: pasted text and attached files.

While a message is written its chips are names in brackets; when it is sent each becomes its text
again, and where it lies is remembered, so that the conversation shows the name too. Knows text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localrt.errors import OptionError, StorageError
from localrt.tui.blocks import Fold
from localrt.tui.text import human_bytes

__all__ = ["LARGEST_FILE", "Chips", "Draft", "read_attachment"]

LARGEST_FILE = 512_000  # bytes; more than that fills the context of most models
_LONG_LINES = 10
_LONG_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Draft:
    """A message as it is sent, and what of it is shown folded."""

    text: str
    folds: tuple[Fold, ...] = ()


class Chips:
    """The chips of one composer: ``[notes.txt, 120 lines]`` and what each stands for."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    @staticmethod
    def is_long(text: str) -> bool:
        """Whether pasted text is long enough for a chip."""
        return text.count("\n") >= _LONG_LINES or len(text) >= _LONG_CHARACTERS

    def add(self, name: str, text: str) -> str:
        """The chip for ``text``, to be put into the message."""
        lines = text.count("\n") + (not text.endswith("\n"))
        size = f"{lines} lines" if lines > 1 else human_bytes(len(text.encode(errors="replace")))
        label, number = f"[{name}, {size}]", 1
        while self._texts.get(label, text) != text:
            number += 1
            label = f"[{name} {number}, {size}]"
        self._texts[label] = text
        return label

    def text_of(self, label: str) -> str:
        """What a chip stands for."""
        return self._texts[label]

    def before(self, line: str, column: int) -> str:
        """The chip that ends at ``column`` of a line, or that it is in; empty for none."""
        for match in self._found(line):
            if match.start() < column <= match.end():
                return match.group()
        return ""

    def expanded(self, text: str) -> Draft:
        """The message with every chip's text in its place."""
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

    def folded(self, draft: Draft) -> str:
        """A sent message as it was written, its folds as chips again."""
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
                f"{path} has {human_bytes(size)}: attach at most {human_bytes(LARGEST_FILE)}, "
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
