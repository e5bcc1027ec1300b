"""What goes with a message, as text: a file in a fence under its name, a folder as the list of its
files.

Text is UTF-8, else what a mark at its beginning says, else what this system or Windows writes; a
``note`` says so. Knows files, neither labels nor the composer.
"""

from __future__ import annotations

import codecs
import locale
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from localrt.errors import LocalrtError, OptionError, StorageError
from localrt.formatting import format_bytes
from localrt.tui.mentions import Mention, mentions
from localrt.tui.text import clean

__all__ = ["LARGEST_FILE", "AttachedFile", "read_attachment", "read_mentioned"]

LARGEST_FILE = 512_000  # bytes; more than that fills the context of most models
_MOST_LISTED = 500
_LEFT_OUT = ("node_modules", "__pycache__")  # beside folders that begin with a dot
_MARKS = (  # the longer first: UTF-32's begins as UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NO_TEXT = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """``text`` is what the model reads; ``size`` is the file's, ``"120 lines"``."""

    name: str
    text: str
    size: str
    note: str = ""


def read_attachment(argument: str) -> AttachedFile:
    """A file or folder to attach. Its name is the path as written, or the end of an absolute one.

    Raises:
        OptionError: no path, too large, or not text.
        StorageError: it cannot be read.
    """
    if not argument:
        raise OptionError("/attach needs the path of a text file or folder")
    path = Path(argument.strip("'\"")).expanduser()
    name = clean(str(path.name if path.is_absolute() else path)).replace("\n", " ")
    try:
        if path.is_dir():
            return _listed(path, name)
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
    text, encoding = _decoded(data, path)
    text = text.replace("\r\n", "\n")
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    body = text if text.endswith("\n") else text + "\n"
    lines = body.count("\n")
    return AttachedFile(
        name,
        f"{name}:\n{fence}{path.suffix[1:]}\n{body}{fence}\n",
        f"{lines} lines" if lines > 1 else format_bytes(size),
        f"{name} is not UTF-8: it was read as {encoding}." if encoding else "",
    )


def read_mentioned(text: str) -> list[tuple[Mention, AttachedFile]]:
    """The files and folders that a message names.

    Raises:
        StorageError: one is not there, or cannot be attached.
    """
    found = []
    for mention in mentions(text):
        try:
            found.append((mention, read_attachment(mention.path)))
        except LocalrtError as error:
            name = text[mention.start : mention.end]
            raise StorageError(f"{error}; `{name}` in backticks is sent as text") from error
    return found


def _decoded(data: bytes, path: Path) -> tuple[str, str]:
    """The text, and its encoding where that is not UTF-8."""
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    # UTF-16 without a mark: every other byte of Latin text is 0.
    halves = {"utf-16-be": data[::2], "utf-16-le": data[1::2]}
    wide = [name for name, half in halves.items() if half.count(0) > len(data) / 8]
    tried = [marked] if marked else ["utf-8-sig", *wide]
    if not (marked or b"\0" in data):
        tried += [locale.getpreferredencoding(False), "cp1252"]
    for encoding in tried:
        try:
            text = data.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
        if not _NO_TEXT.search(text):
            return text, "" if encoding == "utf-8-sig" else encoding
    raise OptionError(f"{path} is not a text file: only text can be attached")


def _listed(folder: Path, name: str) -> AttachedFile:
    """A folder as the list of its files, the first 500 of them."""
    files = list(islice(_files(folder), _MOST_LISTED + 1))
    lines = [f"{path.relative_to(folder).as_posix()} ({size})" for path, size in files]
    count = f"{len(files)} files" if len(files) != 1 else "1 file"
    if len(files) > _MOST_LISTED:
        lines[-1] = "..."
        count = f"more than {_MOST_LISTED} files"
    body = "\n".join(map(clean, lines)) or "no files"
    name = name.rstrip("/") + "/"
    return AttachedFile(name, f"Files in {name}:\n```\n{body}\n```\n", count)


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """The files below a folder and their sizes, without hidden ones."""
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _LEFT_OUT)
        for name in sorted(names):
            path = Path(above, name)
            if not name.startswith(".") and path.is_file():
                yield path, format_bytes(path.stat().st_size)
