"""Which kinds of documents there are, and who reads each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, cast

from localrt.common.errors import OptionError
from localrt.documents.page import Page, decoded, utf8

MOST_READ = 32 << 20  # bytes: the most that is read of a file without pages

Reader: TypeAlias = Callable[[Path | bytes, str, int], Iterator[Page]]

# By suffix: the module and function that read it, and its media types.
_OFFICE, _OPEN = (
    "application/vnd.openxmlformats-officedocument",
    "application/vnd.oasis.opendocument",
)
_KINDS = {
    ".pdf": ("pdf", "pdf_pages", "application/pdf"),
    ".docx": ("office", "read_word", f"{_OFFICE}.wordprocessingml.document"),
    ".pptx": ("office", "read_slides", f"{_OFFICE}.presentationml.presentation"),
    ".xlsx": ("sheets", "read_sheets", f"{_OFFICE}.spreadsheetml.sheet"),
    ".xls": ("sheets", "read_sheets", "application/vnd.ms-excel"),
    ".ods": ("sheets", "read_sheets", f"{_OPEN}.spreadsheet"),
    ".rtf": ("web", "read_rich_text", "application/rtf", "text/rtf"),
    ".odt": ("web", "read_text", f"{_OPEN}.text"),
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
    **{".doc": ".docx", ".docm": ".docx", ".pages": ".docx", ".msg": ".eml", ".mobi": ".epub"},
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
