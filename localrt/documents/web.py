"""HTML as Markdown, by turbohtml, which parses as browsers do; and what holds HTML or the like:
books (EPUB), rich text, e-mails and notebooks.
"""

from __future__ import annotations

import email.policy
import io
import json
import re
import zipfile
from collections import Counter
from email.message import EmailMessage
from posixpath import dirname, join, normpath
from typing import Any
from urllib.parse import unquote

import turbohtml
from striprtf.striprtf import rtf_to_text
from turbohtml import Element, Markdown

from localrt.documents.kinds import Page, decoded, with_bullets

# What browsers do not show, or what is no text.
_HIDDEN = (
    "script, style, template, noscript, iframe, svg, [hidden], [style*='display:none' i], "
    "[style*='display: none' i], [style*='max-height:0;' i], [style*='max-height:0px' i], "
    "input[type=hidden], input[type=password]"
)
_PARTS = "thead, tbody, tfoot, tr, td, th"  # of a table
_BLOCKS = "table, h1, h2, h3, h4, h5, h6, ul, ol, pre, blockquote"
# Elements that XML may close at once, unlike HTML.
_EMPTY = re.compile(
    rb"<(script|style|title|iframe|[abipqsu]|h[1-6]|div|span|em|strong|li|td)(\s[^<>]*)?/>"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OVERWRITTEN = re.compile(r"(?m)^.*\r(?=[^\r\n])")  # by a progress bar, say


def _math(element: Element, inner: str) -> str:
    tex = element.select_one("annotation[encoding='application/x-tex']")
    return f"${tex.text.strip()}$" if tex else element.text


_MARKS = {"b": "**", "strong": "**", "i": "*", "em": "*", "del": "~~", "s": "~~"}


def _marked(element: Element, inner: str) -> str:
    """Emphasis as Markdown: beside converters, turbohtml would write some of it as HTML."""
    mark = _MARKS[element.tag]
    plain = not inner.strip() or element.select_one(f"p, div, {_BLOCKS}")
    return inner or " " if plain else f"{mark}{inner}{mark}"


_STYLE = Markdown(
    escaping=Markdown.Escaping(mode="none", asterisks=False, underscores=False),
    images=Markdown.Images(mode="ignore"),
    links=Markdown.Links(ignore=True),
    tables=Markdown.Tables(cell_blocks="text"),
    converters={
        **dict.fromkeys(_MARKS, _marked),
        "math": _math,
        "sup": lambda element, inner: f"^{inner}",
        "input": lambda element, inner: str(element.attrs.get("value") or ""),
        "option": lambda element, inner: f"{inner}\n",
    },
)


def markdown(tree: Any, left_out: Counter[str]) -> str:
    """The text of a parsed page, whose pictures are counted in ``left_out``. Changes the tree."""
    for each in tree.select(_HIDDEN):
        each.decompose()
    left_out["picture"] += len(tree.select("img, canvas, video, object"))
    if (head := tree.find("head")) and (title := head.find("title")):
        head.tag, title.tag = "div", "p"
    for each in tree.select("input[type=checkbox], input[type=radio]"):
        each.attrs["value"] = "[x] " if "checked" in each.attrs else "[ ] "
    for table in tree.select("table"):
        _set_table(table)
    return str(tree.to_markdown(_STYLE))


def _set_table(table: Element) -> None:
    """Give each row of a table all cells; make blocks of one that arranges a page."""
    if caption := table.find("caption"):
        caption.tag = "p"
        table.insert_before(caption)
    parts = [each for each in table.select(_PARTS) if each.closest("table") == table]
    cells = [each for each in parts if each.tag in ("td", "th")]
    blocks = "table, pre" if table.find("th") else _BLOCKS  # one with headings holds data
    if len(cells) == 1 or any(cell.select_one(blocks) for cell in cells):
        for each in [table, *parts]:
            each.tag = "div"
        return
    below: dict[int, int] = {}  # by column: in how many of the next rows a cell goes on
    for row in table.select("tr"):
        column = 0
        for cell in row.select("td, th"):
            while below.get(column):
                below[column] -= 1
                cell.insert_before(Element("td"))
                column += 1
            wide, high = (_count(cell.attrs.pop(f"{side}span", "")) for side in ("col", "row"))
            for _ in range(wide - 1):
                cell.insert_after(Element("td"))
            below |= dict.fromkeys(range(column, column + wide), high - 1)
            column += wide


def _count(text: Any) -> int:
    return min(int(text), 100) if str(text).isdecimal() and int(text) else 1


def read_web(data: bytes) -> Page:
    """A web page, in the encoding that it names."""
    left_out = Counter[str]()
    tree = turbohtml.parse(data, detect_encoding=True, scripting=True)
    return Page(markdown(tree, left_out), left_out=left_out)


def read_saved_page(data: bytes) -> Page:
    """A web page that a browser saved as a single file."""
    mail: Any = email.message_from_bytes(data, policy=email.policy.default)
    page = mail.get_body(("html",))
    return read_web(page.get_payload(decode=True))


def _part(archive: zipfile.ZipFile, name: str) -> Any:
    return turbohtml.parse_xml(archive.read(name).decode("utf-8-sig"))


def read_book(data: bytes) -> Page:
    """The chapters of an EPUB, in reading order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if "META-INF/rights.xml" in archive.namelist():
            raise ValueError("it is locked by DRM")
        place = _part(archive, "META-INF/container.xml").find("rootfile").attrs["full-path"]
        book = _part(archive, place)
        files = {_local(each, "id"): _local(each, "href") for each in _all(book, "item")}
        parts, left_out = list[str](), Counter[str]()
        for each in _all(book, "itemref"):
            name = normpath(join(dirname(place), unquote(files[_local(each, "idref")])))
            page = _EMPTY.sub(rb"<\1\2></\1>", archive.read(name))
            tree = turbohtml.parse(page, detect_encoding=True, scripting=True)
            parts.append(markdown(tree.find("body") or tree, left_out))  # no titles
    return Page("\n\n".join(parts), left_out=left_out)


def _all(tree: Any, name: str) -> list[Any]:
    """The elements of an XML tree with this name, whatever the prefix of its namespace."""
    return [each for each in tree.descendants if _name(each) == name]


def _name(element: Any) -> str:
    return str(getattr(element, "tag", "")).rpartition(":")[2]


def _local(element: Any, name: str) -> str:
    found = (value for key, value in element.attrs.items() if key.rpartition(":")[2] == name)
    return str(next(found, ""))


def read_mail(data: bytes) -> Page:
    """An e-mail's main headers and text; of attachments the names."""
    mail = email.message_from_bytes(data, policy=email.policy.default)
    names = ("From", "To", "Cc", "Date", "Subject")
    lines = [f"{name}: {mail[name]}" for name in names if mail[name]]
    if not lines:
        raise ValueError("it has no headers")
    left_out = Counter[str]()
    body = mail.get_body(("plain", "html")) or EmailMessage()
    raw: Any = body.get_payload(decode=True) or b""
    try:
        text = raw.decode(body.get_content_charset() or "utf-8")
    except (LookupError, UnicodeDecodeError):
        text = decoded(raw, "its text")[0]
    if body.get_content_subtype() == "html":
        text = markdown(turbohtml.parse(text, scripting=True), left_out)
    attached = [each.get_filename() or _subject(each) for each in mail.iter_attachments()]
    lines += [f"Attachment: {name}" for name in attached]
    left_out["attachment"] = len(attached)
    return Page("\n".join([*lines, "", text]), left_out=left_out)


def _subject(part: Any) -> str:
    """What to call a mail that is attached to another."""
    return (part.is_multipart() and part.get_payload(0)["Subject"]) or "no name"


# Forms of a result, the one that says most first. Old notebooks (format 3) have short names for
# them, and no dictionary around them.
_FORMS = {
    **{"text/markdown": "markdown", "text/latex": "latex", "text/plain": "text"},
    **{"text/html": "html", "application/json": "json"},
}


def read_notebook(data: bytes) -> Page:
    """A notebook's cells in order, what they printed and returned, and their errors."""
    notebook, left_out, parts = json.loads(decoded(data, "")[0]), Counter[str](), list[str]()
    language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    sheets = notebook.get("worksheets", [notebook])
    for cell in (cell for sheet in sheets for cell in sheet["cells"]):
        code = cell["cell_type"] == "code"
        source = _joined(cell["input"] if "input" in cell else cell["source"]).strip()
        parts.append(f"```{language}\n{source}\n```" if code else source)
        for output in cell.get("outputs", ()):
            text = _OVERWRITTEN.sub("", _COLOURS.sub("", _output(output, left_out))).strip()
            parts.append(text and f"Output:\n{text}")
    return Page("\n\n".join(filter(None, parts)), left_out=left_out)


def _joined(lines: Any) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def _output(output: dict[str, Any], left_out: Counter[str]) -> str:
    if "ename" in output:
        return "\n".join(output.get("traceback") or [f"{output['ename']}: {output['evalue']}"])
    told = output.get("data", output)
    found = {new: told[old] for new, old in _FORMS.items() if old in told}
    found |= {name: told[name] for name in _FORMS if name in told}
    left_out["picture"] += any(name.startswith(("image/", "png")) for name in told)
    plain = _joined(found.get("text/plain", ""))
    if plain.startswith("<") and plain.endswith(">") and len(found) > 1:
        del found["text/plain"]  # the name of an object
    for name in filter(found.__contains__, _FORMS):
        if name == "application/json":
            return json.dumps(found[name], ensure_ascii=False)
        text = _joined(found[name])
        return markdown(turbohtml.parse(text), left_out) if name == "text/html" else text
    return ""


def read_rich_text(data: bytes) -> Page:
    """The text of an RTF file."""
    if not data.lstrip().startswith(b"{\\rtf"):
        raise ValueError("it has no RTF header")
    copies = data.count(b"\\nonshppict")  # for old programs
    pictures = Counter({"picture": data.count(b"\\pict") - copies})
    text = rtf_to_text(data.decode("latin-1"), errors="ignore")
    return Page(with_bullets(text), left_out=pictures)
