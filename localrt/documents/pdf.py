"""PDF files by PDFium, page by page: text, values of forms, notes, and pictures of scans."""

from __future__ import annotations

import ctypes
import io
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pypdfium2
import pypdfium2.raw as raw
from PIL import Image

from localrt.common.errors import OptionError
from localrt.common.files import MOST_BYTES
from localrt.common.forks import free_in_child
from localrt.documents.kinds import Page, with_bullets

Image.preinit()  # a confined process cannot load libraries later
_MOST_PAGES = 20_000
_LITTLE = 200  # characters: a page number or a stamp on a scan has fewer
_PIXELS = 1536  # of a picture's longer side: small print stays readable
_LOCK = free_in_child(threading.RLock())  # PDFium is not thread-safe
_HYPHEN = re.compile("[\x02\ufffe]\n?")  # a word divided at a line's end
_CONTROL = re.compile(r"[\0-\x08\x0b-\x1f]")


def pdf_pages(source: Path | bytes, name: str, pictures: int) -> Iterator[Page]:
    """Yield the pages; the first ``pictures`` pages with little or no text have a picture, if there
    is anything to see. Raises ``OptionError``.
    """
    if isinstance(source, Path) and source.stat().st_size > MOST_BYTES:
        raise OptionError(f"{name} is too large: the most is {MOST_BYTES // 1_000_000} MB")
    with _LOCK:
        # Sets PDFium's last error, which stays that of an earlier file if this one has no pages.
        raw.FPDF_LoadMemDocument64(b"", 0, None)
        try:
            pdf = pypdfium2.PdfDocument(source)
        except pypdfium2.PdfiumError as error:
            why = "is not a PDF file that can be read: it is damaged or incomplete"
            if error.err_code == raw.FPDF_ERR_PASSWORD:
                why = "is locked by a password: save a copy without one"
            raise OptionError(f"{name} {why}") from error
        pdf.init_forms()
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
        notes, values = _annotations(pdf, page)
        if notes or values:
            # What a form and notes show becomes a part of the page.
            raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
            page.close()
            page = pdf[number - 1]
        found = page.get_textpage()
        text = _lines(found, values) if values else found.get_text_range()
        text = _CONTROL.sub("", _HYPHEN.sub("", text.replace("\r\n", "\n")))
        text = with_bullets(text).strip()
        left_out = Counter[str]()
        if len(text) < _LITTLE and (_is_scan(page) if text else _shows(page)):
            left_out["scan"] = 1
        shown = _picture(page) if picture and left_out else b""
        text = "\n".join(filter(None, [text, *(f"[note: {note}]" for note in notes)]))
        return Page(text, number, shown, left_out=left_out)
    finally:
        page.close()  # and what was opened of it


def _shows(page: Any) -> bool:
    return next(page.get_objects(max_depth=1), None) is not None


def _is_scan(page: Any) -> bool:
    """Whether pictures cover most of a page."""
    width, height = page.get_size()
    images = page.get_objects([raw.FPDF_PAGEOBJ_IMAGE], max_depth=3)
    areas = ((r - left) * (t - low) for left, low, r, t in (each.get_bounds() for each in images))
    return bool(sum(areas) > width * height / 2)


_Box = tuple[float, float, float, float]  # left, bottom, right, top


def _annotations(pdf: Any, page: Any) -> tuple[list[str], list[tuple[_Box, str]]]:
    """Comments on a page, and the values of its form and typed notes with their places."""
    comments, values, size = list[str](), list[tuple[_Box, str]](), 1 << 16
    if not raw.FPDFPage_GetAnnotCount(page):
        return comments, values
    text, box = (ctypes.c_ushort * (size // 2))(), raw.FS_RECTF()
    for place in range(raw.FPDFPage_GetAnnotCount(page)):
        each = raw.FPDFPage_GetAnnot(page, place)
        kind = raw.FPDFAnnot_GetSubtype(each)
        if kind == raw.FPDF_ANNOT_WIDGET and pdf.formenv:
            count = raw.FPDFAnnot_GetFormFieldValue(pdf.formenv, each, text, size)
            of = raw.FPDFAnnot_GetFormFieldType(pdf.formenv, each)
            if of in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
                checked = raw.FPDFAnnot_IsChecked(pdf.formenv, each)
                text[0], count = ord("\u2714"), 4 if checked else 0
        else:
            count = raw.FPDFAnnot_GetStringValue(each, b"Contents", text, size)
        raw.FPDFAnnot_GetRect(each, box)
        raw.FPDFPage_CloseAnnot(each)
        if not 2 < count <= size:
            continue
        value = bytes(text)[: count - 2].decode("utf-16-le", "replace").strip()
        if kind in (raw.FPDF_ANNOT_WIDGET, raw.FPDF_ANNOT_FREETEXT):
            values.append(((box.left, box.bottom, box.right, box.top), value))
        elif kind != raw.FPDF_ANNOT_POPUP:
            comments.append(value)
    return comments, values


def _lines(found: Any, values: list[tuple[_Box, str]]) -> str:
    """The text of a page with a form, line by line, so that values stand beside their labels."""
    rects = map(found.get_rect, range(found.count_rects()))
    boxes: list[tuple[_Box, str]] = [(each, found.get_text_bounded(*each)) for each in rects]
    # Some appearances, of check boxes say, are up to the viewer.
    boxes += (each for each in values if not found.get_text_bounded(*each[0]).strip())
    # Landscape forms are turned, in quarters of a circle to the right here.
    angles = (raw.FPDFText_GetCharAngle(found, place) for place in range(found.count_chars()))
    quarters = Counter(round(angle * 2 / math.pi) for angle in angles)
    for _ in range(-max(quarters, key=quarters.__getitem__, default=0) % 4):
        boxes = [((low, -right, top, -left), text) for (left, low, right, top), text in boxes]
    boxes.sort(key=lambda each: -each[0][1] - each[0][3])
    lines, last = list[list[tuple[_Box, str]]](), 0.0
    for box, text in boxes:
        middle = (box[1] + box[3]) / 2
        if not lines or middle < last:
            lines.append([])
            last = box[1]
        lines[-1].append((box, text))
    return "\n".join(" ".join(text for _, text in sorted(line)) for line in lines)


def _picture(page: Any) -> bytes:
    scale = _PIXELS / max(*page.get_size(), 1.0)
    image, stream = page.render(scale=scale).to_pil(), io.BytesIO()
    image.convert("RGB").save(stream, "JPEG", quality=85)
    return stream.getvalue()
