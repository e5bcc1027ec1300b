"""Documents as text: every kind, bad files, folders."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from localrt import DocumentIndex, OptionError, Progress, StorageError, read_document
from localrt.documents import kinds, reading
from localrt.documents import pdf as pdfs
from tests.conftest import needs_links
from tests.documents.samples import NOTEBOOK, RED, WORD, form, one_page, pdf, scan, stream, turned

DATA = Path(__file__).parent.parent / "data"
WORD_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
PLAN = "## Plan\n\nFish & chips\n\n* one\n\na\tb\n\n| x | y |\n|---|---|\n\nend"
SHOWN = "T\n\n## Head\n\nOne & two\n\n- item\n\n| x | y |\n| --- | --- |\n\n```\na\n  b\n```\n\nend"
PAGE = b"""<!DOCTYPE html><html><head><title>T</title><style>p { color: red }</style></head>
<body><!-- <p>note --><h2>Head</h2><p>One &amp;
 two</p><ul><li>item</ul><script>if (1 < 2) "<b>no</b>"</script>
<table><tr><td>x</td><td>y</td></tr></table><pre>a
  b</pre><svg><text>drawn</text></svg><p>end</body></html>"""


@pytest.mark.parametrize(
    ("name", "media_type", "data", "text"),
    [
        ("a.pdf", "", pdf("One", "Two (2)\nlines"), "[page 1]\nOne\n\n[page 2]\nTwo (2)\nlines"),
        ("a", f"{WORD_TYPE}; x=1", WORD, PLAN),
        ("a.html", "", PAGE, SHOWN),
        (
            "a.ipynb",
            "",
            NOTEBOOK,
            "# Title\nWords\n\n```julia\n1 + 1\n```\n\nOutput:\n2\n\nOutput:\nprinted",
        ),
        ("a.csv", "text/csv", b"x,y\r\n1,2\r\n", "x,y\n1,2"),
    ],
)
def test_kinds(name: str, media_type: str, data: bytes, text: str) -> None:
    read = read_document(data, name=name, media_type=media_type)
    fence = "````" if "```" in text else "```"
    kind = "csv" if name == "a.csv" else ""
    assert read.text == f"{name}:\n{fence}{kind}\n{text}\n{fence}\n"
    assert read.note == ""


def test_pages_without_text() -> None:
    data = pdf("One", RED, "")
    read = read_document(data, name="a.pdf")
    assert read.size == "3 pages"
    assert "[page 2]\n[no text]\n\n[page 3]\n[no text]\n" in read.text
    assert read.note == "a.pdf: 2 of 3 pages have little or no text, and are not shown."
    assert read.pictures == ()
    read = read_document(data, name="a.pdf", pictures=True)
    assert "[page 2]\n[no text: see its picture]" in read.text
    assert read.note == "a.pdf: 1 of 3 pages have little or no text, and are not shown.", (
        "a blank page"
    )
    (page,) = read.pictures
    with Image.open(io.BytesIO(page.picture)) as picture:
        assert (page.number, picture.size) == (2, (1536, 768))
        red, green, blue = picture.getpixel((700, 300))  # type: ignore[misc]
    assert red > 240 > 20 > max(green, blue)


VALUES = "Name: Ada Lovelace\nCountry: Norway\nAgree: \u2714\nTyped note\n[note: Is this right?]"


@pytest.mark.parametrize("options", [{}, {"appearances": False}])
def test_values_of_forms_stand_beside_their_labels(options: dict[str, bool]) -> None:
    read = read_document(form(**options), name="a.pdf")
    shown = read.text.split("\n", 3)[3].replace(" \n", "\n")
    assert shown == f"{VALUES}\n```\n"
    assert read.note == ""


def test_notes_and_forms_alone() -> None:
    """Notes need no form; a form alone is text, and in its picture."""
    for kind in ("Text", "FreeText"):
        note = f"/Type /Annot /Subtype /{kind} /Rect [300 100 500 120] /Contents (Right?) /F 4"
        made = one_page(
            "BT /F1 10 Tf 50 700 Td (Printed) Tj ET", f"<< {note} >>", entries="/Annots [6 0 R]"
        )
        text = read_document(made, name="a.pdf").text
        assert "Printed" in text
        assert "Right?" in text
    text = read_document(form(labels=False), name="a.pdf", pictures=True).text
    assert "Ada Lovelace" in text
    assert "Norway" in text
    pages = pdfs.pdf_pages(form(labels=False), "a.pdf", 1)
    assert [page.picture for page in pages] == [b""]


@pytest.mark.parametrize(
    ("data", "shown", "pictures"),
    [
        (scan(), "[no text: see its picture]", 1),
        (scan("Page 1 of 9"), "Page 1 of 9\n[see its picture]", 1),
        (scan("Words " * 40), "Words " * 40, 0),  # it has been recognized
        (scan("A letter", "100 0 0 100 50 50"), "A letter", 0),  # with a logo
    ],
)
def test_scans(data: bytes, shown: str, pictures: int) -> None:
    read = read_document(data, name="a.pdf", pictures=True)
    assert read.text.split("\n", 3)[3] == f"{shown.strip()}\n```\n"
    assert (len(read.pictures), read.note) == (pictures, "")
    unseen = "a.pdf: 1 of 1 pages have little or no text, and are not shown."
    assert read_document(data, name="a.pdf").note == (unseen if pictures else "")


@pytest.mark.parametrize("matrix", ["0 1 -1 0", "-1 0 0 -1"])
@pytest.mark.parametrize("rotate", [0, 90])
def test_turned_text_keeps_its_lines(matrix: str, rotate: int) -> None:
    lines = read_document(turned(matrix, rotate), name="a.pdf").text.split("\n")
    assert set(lines) >= {"First line of it", "Second line of it", "Third line of it"}


def test_bullets() -> None:
    """Their font has no other codes for them, as in PDF files of Word."""
    codes = "2 beginbfchar <41> <F0B7> <42> <F0FE> endbfchar"
    made = one_page(
        "BT /F1 10 Tf 50 700 Td (A dot) Tj 0 -14 Td (B box) Tj ET",
        stream(f"1 begincodespacerange <00> <FF> endcodespacerange {codes}"),
    )
    made = made.replace(b"/Helvetica", b"/Helvetica /ToUnicode 6 0 R")
    assert "• dot\n☒ box\n" in read_document(made, name="a.pdf").text


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_document(pdf(*[RED] * 22), name="a.pdf", pictures=True)
    assert len(read.pictures) == 20
    assert "2 of 22 pages" in read.note
    # A file without pages is not said to be locked because another file was.
    with pytest.raises(OptionError, match="locked"):
        read_document(DATA / "locked.pdf")
    with pytest.raises(OptionError, match="damaged"):
        read_document(pdf(), name="a.pdf")
    monkeypatch.setattr(pdfs, "_MOST_PAGES", 1)
    with pytest.raises(OptionError, match="has 2 pages: the most is 1"):
        read_document(pdf("a", "b"), name="a.pdf")
    with pytest.raises(StorageError, match="No such file"):
        read_document("no/such.pdf")


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.pdf", b"%PDF-1.7 and no more", "a.pdf is not a PDF file that can be read"),
        ("a.pdf", (DATA / "locked.pdf").read_bytes(), "a.pdf is locked by a password"),
        ("a.docx", b"\xd0\xcf\x11\xe0 an encrypted one", "a.docx cannot be read"),
        ("a.ipynb", b'{"cells": 3}', "no .ipynb file"),
        ("a", b"\x7fELF\0\1", "a is not a text file"),
        pytest.param("a.txt", b"x" * (kinds.MOST_READ + 1), "too large", id="too large"),
        pytest.param("a.txt", b"x" * 4_000_001, "too much text", id="too much text"),
    ],
)
def test_bad_files(name: str, data: bytes, why: str) -> None:
    with pytest.raises(OptionError, match=why) as raised:
        read_document(data, name=name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("data", [b"<a" * 100_000, b"<!--" * 50_000])
def test_markup_that_never_ends(data: bytes) -> None:
    """In time that grows with the size, not with its square: a test's time limit tells."""
    read_document(data * 10, name="a.html")


def test_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is read again if another name or use shows it otherwise, or others took its room."""
    asked: list[bytes] = []

    def counted(source: bytes, **how: Any) -> reading.Document:
        asked.append(source)
        return read_document(source, **how)

    monkeypatch.setattr(reading, "read_document", counted)
    one, long = b"one", b"x" * 5000
    cache = reading.DocumentCache(most_bytes=4000)
    same = {"name": "a.txt", "media_type": "text/plain", "pictures": False}
    assert cache.read(one, **same) is cache.read(one, **same)
    assert "b.txt" in cache.read(one, **{**same, "name": "b.txt"}).text
    cache.read(one, **{**same, "pictures": True})
    assert asked == [one, one, one]
    for _ in range(2):
        assert cache.read(long, **same).text == read_document(long, name="a.txt").text
    cache.read(one, **same)
    assert asked[3:] == [long, long, one]


def test_long_file(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 1_000_000)
    read = read_document(path)
    assert (read.text, read.whole, read.path) == ("", False, path)


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "node_modules").mkdir()
    files = {"b.txt": b"bee", "a.pdf": pdf("One"), "sub/c.bin": b"\0\1", ".hidden/d.txt": b"d"}
    for name, data in {**files, "node_modules/e.js": b"e"}.items():
        (tmp_path / name).write_bytes(data)
    read = read_document(tmp_path, name="notes")
    listed, *texts = read.text.split("\n\n", 1)
    size = len(files["a.pdf"])
    assert (
        listed
        == f"Files in notes/:\n```\na.pdf ({size} B)\nb.txt (3 B)\nsub/c.bin (2 B, left out)\n```"
    )
    assert texts == ["notes/a.pdf:\n```\n[page 1]\nOne\n```\n\nnotes/b.txt:\n```txt\nbee\n```\n"]
    assert (read.size, read.path) == ("3 files", tmp_path)
    assert read.note == "notes/: 1 of 3 files cannot be read as text: left out."


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    try:
        (folder / "inside.txt").symlink_to("a.txt")
        (folder / "notes.txt").symlink_to(tmp_path / "key")
    except OSError:
        pytest.skip("this system makes no links")
    text = read_document(folder).text
    assert "inside.txt" in text
    assert "secret" not in text


@needs_links
@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("closed/file", "b.txt (left out)"),
        ("../closed/file", ""),  # it leads out of the folder
        ("b.txt", ""),  # to itself
        ("nowhere", ""),
    ],
)
def test_links_that_cannot_be_followed(
    target: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None keeps the other files out, neither of what is read nor of what is indexed."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("words")
    (folder / "b.txt").symlink_to(target)
    stat = Path.stat

    def closed(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == "b.txt" and "closed" in target and follow_symlinks:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", closed)
    read = read_document(folder)
    assert "words" in read.text
    assert told in read.text
    assert read.note == ("project/: 1 of 2 files cannot be read as text: left out." if told else "")
    with DocumentIndex(None) as index:
        left_out = index.update([folder])
        assert [each.path.name for each in index.search("words")] == ["a.txt"]
    assert [path.name for path in left_out] == ["b.txt"] * bool(told)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("a.pdf", [("a.pdf", 1, 2, "pages"), ("a.pdf", 2, 2, "pages")]),
        ("", [*[("a.pdf", 1, 2, "files")] * 2, ("b.txt", 2, 2, "files")]),
    ],
)
def test_progress(tmp_path: Path, name: str, steps: list[tuple[str, int, int, str]]) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf("One", "Two"))
    (tmp_path / "b.txt").write_text("words")
    told: list[Progress] = []
    read_document(tmp_path / name, progress=told.append)
    assert [(each.detail, each.done, each.total, each.unit) for each in told] == steps
    assert {each.stage for each in told} == {"read"}
