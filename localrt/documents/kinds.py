"""Reads bytes as text: all kinds of documents but PDF, and text files of any encoding.

Headings and lists are as in Markdown. Scripts, styles, deleted text and pictures are left out.
"""

from __future__ import annotations

import codecs
import html
import io
import json
import locale
import re
import zipfile
import zlib
from pathlib import Path

from localrt.common.errors import OptionError

MOST_READ = 32 << 20  # bytes: the most that is read, or unpacked, of a file without pages

_MARKS = (  # longer ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NO_TEXT = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")


def decoded(data: bytes, name: str) -> tuple[str, str]:
    """The text, and its encoding if that is not UTF-8. Raises ``OptionError``."""
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    # UTF-16 without a mark: in Latin text, every other byte is 0.
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
            return text.replace("\r\n", "\n"), "" if encoding == "utf-8-sig" else encoding
    raise OptionError(f"{name} is not a text file: text, pictures, PDF and Word can be attached")


_BAD_ZIP = (zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, ValueError, EOFError, OSError)
_WORD = re.compile(
    r'<w:t(?: [^<>]*+)?+>([^<]*+)|<w:pStyle w:val="[Hh]eading ?([1-6])"'
    r"|<(w:tab/|w:br|w:cr|w:numPr|/w:p>|/w:tc>|/w:tr>)"
)
_WORD_MARKS = {"w:tab/": "\t", "w:numPr": "- ", "/w:tc>": " | "}


def _word(data: bytes, name: str) -> str:
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        packed = archive.getinfo("word/document.xml")
        if packed.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile  # .docx has no others
        with archive.open(packed) as file:
            xml = file.read(MOST_READ + 1)
    except _BAD_ZIP as error:
        raise OptionError(f"{name} cannot be read: it is damaged, encrypted or no .docx") from error
    if len(xml) > MOST_READ:
        raise OptionError(f"{name} is too large: its text has over {MOST_READ >> 20} MiB")
    # A fallback repeats a text for old programs.
    first, *others = xml.decode(errors="replace").split("<mc:Fallback>")
    text = first + "".join(each.rpartition("</mc:Fallback>")[2] for each in others)
    parts = []
    for match in _WORD.finditer(text.replace("</w:p></w:tc>", "</w:tc>")):
        words, heading, mark = match.groups()
        shown = f"\n{'#' * int(heading)} " if heading else html.unescape(words or "")
        parts.append(_WORD_MARKS.get(mark, "\n") if mark else shown)
    return "".join(parts)


_TAG = re.compile(
    r"<!--.*?(?:-->|\Z)|<([/!?]?)([a-z][a-z0-9]*+)[^<>]*+>", re.DOTALL | re.IGNORECASE
)
_HIDDEN = ("script", "style", "template", "svg", "noscript")
_BREAKS = re.compile(
    "address|article|aside|blockquote|br|d[dlt]|div|fig.*|footer|form|header|h[1-6r]|li|main|nav|"
    "[ou]l|p|pre|section|table|title|tr"
)
_TAG_MARKS = {"li": "- ", "td": " | ", "th": " | ", **{f"h{n}": "#" * n + " " for n in range(1, 7)}}


def _web(data: bytes, name: str) -> str:
    text, parts, hidden, last, pre = decoded(data, name)[0], [""], "", 0, False
    for tag in _TAG.finditer(text + "<br>"):
        if not hidden:
            words = html.unescape(text[last : tag.start()])
            parts.append(words if pre else re.sub(r"\s+", " ", words))
        last, kind, ends = tag.end(), (tag[2] or "").lower(), bool(tag[1])
        if hidden or kind in _HIDDEN:
            hidden = "" if ends and hidden in ("", kind) else hidden or kind
            continue
        pre = not ends if kind == "pre" else pre
        marks = "" if ends else _TAG_MARKS.get(kind, "")
        parts.append("\n" + marks if _BREAKS.fullmatch(kind) else marks)
    return re.sub(r"\n (?=\S)", "\n", "".join(parts))


def _notebook(data: bytes, name: str) -> str:
    parts: list[str] = []
    try:
        notebook = json.loads(decoded(data, name)[0])
        language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
        for cell in notebook["cells"]:
            source, code = "".join(cell["source"]).strip(), cell["cell_type"] == "code"
            parts.append(f"```{language}\n{source}\n```" if code else source)
            for output in cell.get("outputs", ()):
                text = output.get("text") or output.get("data", {}).get("text/plain", "")
                parts.append("".join(text).strip() and f"Output:\n{''.join(text).strip()}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{name} cannot be read: it is no notebook, or damaged") from error
    return "\n\n".join(filter(None, parts))


_READERS = {".docx": _word, ".html": _web, ".htm": _web, ".ipynb": _notebook}
_MEDIA_TYPES = {
    **{"application/pdf": ".pdf", "text/html": ".html"},
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
}


def kind_of(name: str, media_type: str = "") -> str:
    """Return a document's suffix, by a file's name or else its media type; "" for text."""
    suffix = Path(name).suffix.lower()
    if suffix == ".pdf" or suffix in _READERS:
        return suffix
    return _MEDIA_TYPES.get(media_type.partition(";")[0].strip().lower(), "")


def read_as(kind: str, data: bytes, name: str) -> str:
    """Return the text of a document of a ``kind`` other than PDF. Raises ``OptionError``."""
    text = re.sub(r"[ \t]+\n", "\n", _READERS[kind](data, name))
    return re.sub(r"\n{3,}", "\n\n", text).strip()
