"""PDF files by PDFium, page by page: text, or a picture of a page that has none."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localrt.common.errors import OptionError
from localrt.common.files import MOST_BYTES
from localrt.common.forks import free_in_child

_MOST_PAGES = 20_000
_PIXELS = 1536  # of a picture's longer side: small print stays readable
_LOCK = free_in_child(threading.RLock())  # PDFium is not thread-safe
_HYPHEN = re.compile("[\x02\ufffe]\n?")  # a word divided at a line's end
_CONTROL = re.compile(r"[\0-\x08\x0b-\x1f]")


@dataclass(frozen=True, slots=True)
class Page:
    """``number`` counts from 1; 0: the file has no pages. ``picture`` is a JPEG, or empty."""

    text: str
    number: int = 0
    picture: bytes = b""
    encoding: str = ""  # of a text file that is not UTF-8
    of: int = 0  # pages that the file has


def pdf_pages(source: Path | bytes, name: str, pictures: int) -> Iterator[Page]:
    """Yield the pages; the first ``pictures`` pages without text have a picture. Raises
    ``OptionError``.
    """
    import pypdfium2

    if isinstance(source, Path) and source.stat().st_size > MOST_BYTES:
        raise OptionError(f"{name} is too large: the most is {MOST_BYTES // 1_000_000} MB")
    with _LOCK:
        # Sets PDFium's last error, which stays that of an earlier file if this one has no pages.
        pypdfium2.raw.FPDF_LoadMemDocument64(b"", 0, None)
        try:
            pdf = pypdfium2.PdfDocument(source)
        except pypdfium2.PdfiumError as error:
            why = "is not a PDF file that can be read: it is damaged or incomplete"
            if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
                why = "is locked by a password: save a copy without one"
            raise OptionError(f"{name} {why}") from error
        count = len(pdf)
    try:
        if count > _MOST_PAGES:
            raise OptionError(f"{name} has {count:,} pages: the most is {_MOST_PAGES:,}")
        for number in range(1, count + 1):
            with _LOCK:
                try:
                    page = _read(pdf, number, pictures > 0)
                except pypdfium2.PdfiumError:  # this page is broken: others may not be
                    page = Page("", number)
            pictures -= bool(page.picture)
            yield replace(page, of=count)
    finally:
        with _LOCK:
            pdf.close()


def _read(pdf: Any, number: int, picture: bool) -> Page:
    page = pdf[number - 1]
    try:
        text = page.get_textpage().get_text_bounded().replace("\r\n", "\n")
        text = _CONTROL.sub("", _HYPHEN.sub("", text)).strip()
        shows = picture and not text and next(page.get_objects(max_depth=1), None) is not None
        return Page(text, number, _picture(page) if shows else b"")
    finally:
        page.close()  # and what was opened of it


def _picture(page: Any) -> bytes:
    scale = _PIXELS / max(*page.get_size(), 1.0)
    image, stream = page.render(scale=scale, may_draw_forms=False).to_pil(), io.BytesIO()
    image.convert("RGB").save(stream, "JPEG", quality=85)
    return stream.getvalue()
