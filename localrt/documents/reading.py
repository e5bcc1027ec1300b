"""Files and folders as a model reads them: text in a fence under its name, pages marked."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localrt.common.errors import OptionError, StorageError, reason_of
from localrt.common.files import is_file, read_bytes, user_path
from localrt.common.formatting import format_bytes, one_line
from localrt.common.progress import Progress, ProgressCallback
from localrt.documents.confined import DocumentReader
from localrt.documents.kinds import MOST_READ, Page, kind_of, read_plain, utf8

_MOST_TEXT = 4_000_000  # characters; a longer document can only be searched
_PICTURES = 20  # pages of a document shown as pictures
_MOST_LISTED = 500
_LEFT_OUT = ("node_modules", "__pycache__")  # besides hidden folders
_GIT = ("-c", "core.fsmonitor=false", "ls-files", "-z", "-co", "--exclude-standard")
Step = Callable[[int, int, str], None]  # how many of how many, and of what


@dataclass(frozen=True, slots=True)
class Document:
    """A file or folder: what models get as ``text``, and ``pictures`` of pages without text.

    ``size`` is a text such as ``"300 pages"``, ``note`` is for the user. ``path`` is None if it was
    bytes. A document that is too long has no ``text`` and is not ``whole``.
    """

    name: str
    text: str
    size: str
    note: str = ""
    pictures: tuple[Page, ...] = ()
    path: Path | None = None
    whole: bool = True

    @property
    def nbytes(self) -> int:
        """Memory that the text and the pictures take."""
        return sys.getsizeof(self.text) + sum(len(page.picture) for page in self.pictures)


def read_document(
    source: str | Path | bytes,
    *,
    name: str = "",
    media_type: str = "",
    pictures: bool = False,
    progress: ProgressCallback | None = None,
) -> Document:
    """Read a file or folder, or the bytes of a file. ``pictures``: pages without text become
    pictures, for a model that sees. ``media_type`` tells the kind if the ``name`` does not.
    ``progress`` is called for each page or file, and may raise an error of its own to cancel.

    Raises:
        OptionError: it is broken, locked, too large, no regular file, or no text.
        StorageError: it is missing, or cannot be read.
    """
    if isinstance(source, bytes):
        name = name or "the file"
        with DocumentReader() as reader:
            step = step_in(progress, "read", name)
            return _file(source, name, reader, media_type, pictures, step)
    if not str(source):
        raise OptionError(f"{str(source)!r} is no name of a file or folder")
    path = user_path(source)
    name = one_line(name or path.name or str(path))
    try:
        with DocumentReader(path) as reader:
            if path.is_dir():
                return _folder(path, name.rstrip("/") + "/", reader, progress)
            if path.exists() and not path.is_file():
                raise OptionError(f"{path} is not a regular file")
            path.stat()
            step = step_in(progress, "read", name)
            return _file(path, name, reader, media_type, pictures, step)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {path}: {reason_of(error)}") from error


class DocumentCache:
    """The documents used last, by their bytes, within ``most_bytes``; for one thread at a time."""

    def __init__(self, most_bytes: int = 16 << 20) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[tuple[object, ...], Document] = {}  # the last used is the last

    def read(self, source: bytes, *, name: str, media_type: str, pictures: bool) -> Document:
        """Return and raise what ``read_document`` does."""
        key = (hashlib.sha256(source).digest(), name, media_type, pictures)
        found = self._kept.pop(key, None)
        if found is None:
            found = read_document(source, name=name, media_type=media_type, pictures=pictures)
        self._kept[key] = found
        while sum(each.nbytes for each in self._kept.values()) > self._most_bytes:
            del self._kept[next(iter(self._kept))]
        return found


def pages_of(
    source: Path | bytes,
    name: str,
    reader: DocumentReader,
    *,
    media_type: str = "",
    pictures: int = 0,
) -> Iterator[Page]:
    """Yield the pages of a PDF, or another file as one unnumbered page.

    Raises ``OptionError`` or, if the disk fails, ``StorageError``.
    """
    kind = kind_of(name, media_type)
    if isinstance(source, Path) and kind != ".pdf":
        source = read_bytes(source, MOST_READ)
    if isinstance(source, bytes) and len(source) > MOST_READ and kind != ".pdf":
        raise OptionError(f"{name} is too large: the most is {MOST_READ // 1_000_000} MB")
    if not kind and isinstance(source, bytes):  # the usual cases need no library
        if (text := utf8(source)) is not None:
            yield Page(text)
            return
        if b"\0" in source:
            yield read_plain(source, name)
            return
    yield from reader.pages(kind, source, name, pictures)


def step_in(
    progress: ProgressCallback | None, stage: str, name: str, place: int = 1, files: int = 1
) -> Step:
    """A function that reports progress in a file: its pages, or the files if there are several."""

    def step(done: int, total: int, unit: str) -> None:
        if files > 1 or not total:
            done, total, unit = place, files, "files"
        if progress is not None:
            progress(Progress(stage, done, total, unit, one_line(name)))

    return step


def _file(
    source: Path | bytes,
    name: str,
    reader: DocumentReader,
    media_type: str,
    pictures: bool,
    step: Step,
) -> Document:
    path = source if isinstance(source, Path) else None
    parts, shown, unseen, length, left_out = list[str](), list[Page](), 0, 0, Counter[str]()
    most = _PICTURES * pictures
    pages = pages_of(source, name, reader, media_type=media_type, pictures=most)
    for count, page in enumerate(pages, 1):
        step(page.number, page.of, "pages")
        text = page.text
        left_out += page.left_out
        if page.picture:
            shown.append(page)
            text = f"{text}\n[see its picture]" if text else "[no text: see its picture]"
        elif page.number and (not text or page.left_out["scan"]):
            unseen += 1
            text = text or "[no text]"
        parts.append(f"[page {page.number}]\n{text}" if page.number else text)
        length += len(text)
        if length > _MOST_TEXT:
            if path is None:
                raise OptionError(f"{name} has too much text: at most {_MOST_TEXT:,} characters")
            size = f"more than {count} pages" if page.number else format_bytes(length)
            return Document(name, "", size, path=path, whole=False)
    body = "\n\n".join(parts)
    notes = list[str]()
    if unseen:
        notes.append(f"{unseen} of {count} pages have little or no text, and are not shown")
    del left_out["scan"]
    if left_out:
        notes.append(f"left out: {', '.join(counted(*each) for each in left_out.items())}")
    note = f"{name}: {'; '.join(notes)}." if notes else ""
    if page.encoding:  # a text file's, of which nothing is left out
        note = f"{name} is not UTF-8: it was read as {page.encoding}."
    lines = body.count("\n") + (not body.endswith("\n"))
    size = f"{lines} lines" if lines > 1 else format_bytes(path.stat().st_size if path else length)
    size = counted("page", count) if page.number else size
    kind = "" if kind_of(name, media_type) else Path(name).suffix[1:]
    return Document(name, fenced(f"{name}:", body, kind), size, note, tuple(shown), path)


def counted(name: str, count: int) -> str:
    """Return ``"1 page"``, or ``"2 pages"``."""
    return f"{count} {name}{'s' * (count != 1)}"


def fenced(title: str, body: str, kind: str = "") -> str:
    """A text below a title, in a fence longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    return f"{title}\n{fence}{kind}\n{body}{'' if body.endswith(chr(10)) else chr(10)}{fence}\n"


def _folder(
    folder: Path, name: str, reader: DocumentReader, progress: ProgressCallback | None
) -> Document:
    """The list of a folder's files, then those that are text."""
    lines, texts, length, left_out = list[str](), list[str](), 0, 0
    paths = list(files_below(folder))
    for place, path in enumerate(paths, 1):
        step = step_in(progress, "read", path.name, place, len(paths))
        inner, about = one_line(path.relative_to(folder).as_posix(), 500), list[str]()
        try:
            about.append(format_bytes(path.stat().st_size))
            if length <= _MOST_TEXT:
                texts.append(_file(path, name + inner, reader, "", False, step).text)
                length += len(texts[-1])
        except (OptionError, OSError):  # it may have been deleted
            left_out, about = left_out + 1, [*about, "left out"]
        lines.append(f"{inner} ({', '.join(about)})")
    size = f"{len(lines)} files" if len(lines) != 1 else "1 file"
    note = f"{name}: {left_out} of {size} cannot be read as text: left out." if left_out else ""
    if length > _MOST_TEXT:
        return Document(name, "", size, note, path=folder, whole=False)
    lines[_MOST_LISTED:] = ["..."] if len(lines) > _MOST_LISTED else []
    listed = fenced(f"Files in {name}:", "\n".join(lines) or "no files")
    return Document(name, "\n".join([listed, *texts]), size, note, path=folder)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield a folder's files at any depth, without hidden ones, those that git ignores, and links
    that lead out of it.
    """
    top = folder.resolve()
    for inner in _known_to_git(folder) or _walked(folder):
        hidden = any(part.startswith(".") or part in _LEFT_OUT for part in Path(inner).parts)
        path = folder / inner
        if not hidden and is_file(path) and path.resolve().is_relative_to(top):
            yield path


def _known_to_git(folder: Path) -> list[str]:
    command = ["git", "-C", str(folder), *_GIT]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10.0, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted(os.fsdecode(done.stdout).split("\0")[:-1]) if done.returncode == 0 else []


def _walked(folder: Path) -> Iterator[str]:
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _LEFT_OUT)
        yield from (os.path.relpath(Path(above, name), folder) for name in sorted(names))
