"""What goes into a prompt: whole documents while they fit, else the pieces that go best."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localrt import ContextOverflowError, OptionError, read_document
from localrt.documents.index import fitted
from tests.documents.samples import pdf

PAGES = [f"Page about topic{n}. " + "More words here. " * 20 for n in range(40)]


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "report.pdf"
    path.write_bytes(pdf(*PAGES))
    return path


def test_whole_or_searched(report: Path, tmp_path: Path) -> None:
    document = read_document(report)
    size = words(document.text)
    assert fitted([document], "x", free=lambda: 0, count=words) == [document]
    assert fitted([document], "x", free=lambda: 2 * size, count=words) == [document]
    (shown,) = fitted(
        [document], "Where is topic17, in more words?", free=lambda: 1000, count=words
    )
    assert words(shown.text) <= 750
    assert "[report.pdf, page 18]\nPage about topic17." in shown.text
    assert shown.text.startswith("report.pdf (40 pages) is too long to show.")
    number = int(re.match(r"(\d+) pieces of 40 pages", shown.size)[1])  # type: ignore[index]
    assert shown.text.count("[report.pdf, page ") == number > 3
    assert f"the model gets {number} pieces matching the message" in shown.note
    assert (tmp_path / "data" / "localrt" / "documents.db").is_file()


def test_short_files_stay_whole(report: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Some words.\n")
    documents = [read_document(report), read_document(tmp_path / "short.txt")]
    long, short = fitted(documents, "topic3", free=lambda: 1000, count=words)
    assert short is documents[1]
    assert "[report.pdf, page 4]" in long.text


def test_folder(report: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    report.rename(folder / "report.pdf")
    document = read_document(folder, name="folder")
    (shown,) = fitted([document], "topic3", free=lambda: 1000, count=words)
    assert "[folder/report.pdf, page 4]\nPage about topic3." in shown.text


def test_nothing_found(report: Path) -> None:
    (shown,) = fitted([read_document(report)], "zebra", free=lambda: 1000, count=words)
    assert "[report.pdf, page 1]\nPage about topic0." in shown.text
    assert re.search(r"gets its first \d+ pieces, since none matches the message", shown.note)


def test_does_not_fit(report: Path) -> None:
    for document in (read_document(report), read_document(report.read_bytes(), name="a.pdf")):
        with pytest.raises(ContextOverflowError, match="does not fit the context"):
            fitted([document], "x", free=lambda: 60, count=words)
    document = read_document(report)
    report.write_bytes(b"%PDF- broken")
    with pytest.raises(OptionError, match="not a PDF"):
        fitted([document], "x", free=lambda: 1000, count=words)
