"""A page of a document, and text in the encoding that its bytes suggest."""

from __future__ import annotations

import codecs
import locale
import re
from collections import Counter
from dataclasses import dataclass, field

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
