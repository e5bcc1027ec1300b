"""Kinds of documents, who reads each, and their pages as text."""

from __future__ import annotations

import codecs
import locale
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, cast

from localrt.common.errors import OptionError

_MARKS = (  # longer ones first: UTF-32's begins with UTF-16's
    ((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    ((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
)
# What programs write under the names of older encodings.
_WIDER = {"Shift_JIS": "cp932", "GBK": "gb18030", "EUC-KR": "cp949", "Big5": "big5hkscs"}
# Characters of the font Wingdings, and bullets of such fonts, which have no code of their own.
WINGDINGS = {0x6C: "●", 0x6E: "■", 0x6F: "☐", 0xA7: "▪", 0xA8: "☐", 0xD8: "➢", 0xE0: "→"}
WINGDINGS |= {0xFB: "✗", 0xFC: "✓", 0xFD: "☒", 0xFE: "☒", 0x4A: "☺", 0x28: "☎", 0x2A: "✉"}
_BULLET = re.compile(r"(?m)^([ \t]*)([\uf020-\uf0ff])(?=\s)")
_NO_TEXT = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")


@dataclass(frozen=True, slots=True)
class Page:
    """``number`` counts from 1; 0: the file has no pages. ``picture`` is a JPEG, or empty."""

    text: str
    number: int = 0
    picture: bytes = b""
    encoding: str = ""  # of a text file that is not UTF-8
    of: int = 0  # pages that the file has
    left_out: Counter[str] = field(default_factory=Counter)  # what its text lacks: pictures, say


def utf8(data: bytes) -> str | None:
    """The text of a file in UTF-8; None if it is not."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if _NO_TEXT.search(text) else text.replace("\r\n", "\n")


def decoded(data: bytes, name: str) -> tuple[str, str]:
    """The text, and its encoding if that is not UTF-8, which a mark at the beginning names or the
    bytes suggest. Raises ``OptionError``.
    """
    if (text := utf8(data)) is not None:
        return text, ""
    marked = next((name for marks, name in _MARKS if data.startswith(marks)), None)
    # UTF-16 without a mark: in Latin text, every other byte is 0.
    halves = {"utf-16-be": data[::2], "utf-16-le": data[1::2]}
    tried = [name for name, half in halves.items() if half.count(0) > len(data) / 8]
    if marked:
        tried = [marked]
    elif b"\0" not in data:
        from turbohtml.detect import detect

        found = detect(data)
        guess = _WIDER.get(found.encoding or "", found.encoding or "cp1252")
        usual = [locale.getpreferredencoding(False), "cp1252"]  # short texts suggest little
        tried += [guess, *usual] if found.confidence > 0.5 else [*usual, guess]
    for encoding in tried:
        try:
            text = data.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
        if not _NO_TEXT.search(text):
            return text.replace("\r\n", "\n"), encoding.lower()
    raise OptionError(f"{name} is not a text file: text, pictures and documents can be attached")


def with_bullets(text: str) -> str:
    """The text, whose lists and check boxes begin with characters that every font has."""
    return _BULLET.sub(lambda mark: mark[1] + WINGDINGS.get(ord(mark[2]) & 0xFF, "•"), text)


MOST_READ = 32 << 20  # bytes: the most that is read of a file without pages

Reader: TypeAlias = Callable[[Path | bytes, str, int], Iterator[Page]]

# By suffix: the module and function that read it, and its media types.
_OFFICE = "application/vnd.openxmlformats-officedocument"
_KINDS = {
    ".pdf": ("pdf", "pdf_pages", "application/pdf"),
    ".docx": ("office", "read_word", f"{_OFFICE}.wordprocessingml.document"),
    ".pptx": ("office", "read_slides", f"{_OFFICE}.presentationml.presentation"),
    ".xlsx": ("sheets", "read_sheets", f"{_OFFICE}.spreadsheetml.sheet"),
    ".xls": ("sheets", "read_sheets", "application/vnd.ms-excel"),
    ".ods": ("sheets", "read_sheets", "application/vnd.oasis.opendocument.spreadsheet"),
    ".rtf": ("web", "read_rich_text", "application/rtf", "text/rtf"),
    ".html": ("web", "read_web", "text/html", "application/xhtml+xml"),
    ".mhtml": ("web", "read_saved_page", "multipart/related", "application/x-mimearchive"),
    ".epub": ("web", "read_book", "application/epub+zip"),
    ".eml": ("web", "read_mail", "message/rfc822"),
    ".ipynb": ("web", "read_notebook", "application/x-ipynb+json"),
}
_ALSO = {".htm": ".html", ".xhtml": ".html", ".mht": ".mhtml", ".xlsm": ".xlsx", ".xlsb": ".xlsx"}
_TYPES = {name: suffix for suffix, (_, _, *names) in _KINDS.items() for name in names}
# Kinds that are not read, and what to save them as.
_SAVE_AS = {
    **{".doc": ".docx", ".docm": ".docx", ".odt": ".docx", ".pages": ".docx"},
    **{".msg": ".eml", ".mobi": ".epub"},
    **{".ppt": ".pptx", ".pptm": ".pptx", ".odp": ".pptx", ".key": ".pptx", ".numbers": ".xlsx"},
}


def kind_of(name: str, media_type: str = "") -> str:
    """Return a document's suffix, by a file's name or else its media type; "" for text."""
    suffix = Path(name).suffix.lower()
    suffix = _ALSO.get(suffix, suffix)
    media_type = media_type.partition(";")[0].strip().lower()
    return suffix if suffix in _KINDS else _TYPES.get(media_type, "")


def read_plain(data: bytes, name: str) -> Page:
    """Read a text file. Raises ``OptionError``."""
    suffix = Path(name).suffix.lower()
    if (better := _SAVE_AS.get(suffix)) and utf8(data) is None:
        raise OptionError(f"{suffix} files are not read: save {name} as {better} or PDF")
    text, encoding = decoded(data, name)
    return Page(text, encoding=encoding)


def reader_of(kind: str) -> Reader:
    """Return a function that yields the pages of a document of a ``kind``, which ``kind_of`` gives.

    It takes a path or bytes, a name for errors, and how many pages may have pictures, and raises
    ``OptionError``. What it needs is imported now.
    """
    module, function, *_ = _KINDS.get(kind, ("kinds", "read_plain"))
    try:
        read: Any = getattr(import_module(f"localrt.documents.{module}"), function)
    except ImportError as error:
        raise OptionError(f"{kind} files cannot be read, install localrt again: {error}") from error
    if kind == ".pdf":
        return cast(Reader, read)

    def pages(source: Path | bytes, name: str, pictures: int) -> Iterator[Page]:
        data = source.read_bytes() if isinstance(source, Path) else source
        if not kind:
            yield read_plain(data, name)
            return
        try:
            page = read(data)
        except MemoryError:
            raise OptionError(f"{name} is too large: reading it takes too much memory") from None
        except Exception as error:  # libraries raise many
            why = f"it is damaged, locked by a password, or no {kind} file"
            raise OptionError(f"{name} cannot be read: {why}") from error
        text = re.sub(r"[ \t\xa0]+\n", "\n", page.text.replace("\r\n", "\n"))
        yield replace(page, text=re.sub(r"\n{3,}", "\n\n", text).strip())

    return pages
