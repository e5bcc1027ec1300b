"""The search index: what is found, read again, forgotten, and put into a prompt."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from localrt import (
    CancelledError,
    ContextOverflowError,
    DocumentIndex,
    Progress,
    StorageError,
    read_document,
)
from localrt.documents import index as indexes
from localrt.documents.index import fitted, pieces
from tests.documents.samples import pdf


@pytest.fixture
def index(tmp_path: Path) -> Iterator[DocumentIndex]:
    with DocumentIndex(tmp_path / "data" / "documents.db") as index:
        yield index


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read."""
    names: list[str] = []
    pages = indexes.pages_of
    monkeypatch.setattr(
        indexes,
        "pages_of",
        lambda path, name, reader: (names.append(name), *pages(path, name, reader))[1:],
    )
    return names


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(pdf("The cat sat.", "Dogs are barking loudly."))
    (folder / "b.txt").write_text("A cat and a dog met a mouse.\n")
    (folder / "c.txt").write_text("東京は日本の首都です。\n")
    (folder / "d.bin").write_bytes(b"\0\1")
    return folder


def found(index: DocumentIndex, query: str, **options: object) -> list[tuple[str, int]]:
    return [(each.path.name, each.page) for each in index.search(query, **options)]  # type: ignore[arg-type]


def test_search(index: DocumentIndex, notes: Path) -> None:
    left_out = index.update([notes])
    assert list(left_out) == [notes / "d.bin"]
    assert "not a text file" in left_out[notes / "d.bin"]
    assert found(index, "Who barks?") == [("a.pdf", 2)]
    assert found(index, "a mouse") == [("b.txt", 0)]
    assert sorted(found(index, "cats")) == [("a.pdf", 1), ("b.txt", 0)]
    assert found(index, "首都はどこ") == [("c.txt", 0)]
    assert found(index, "cat", within=notes / "b.txt") == [("b.txt", 0)]
    assert len(found(index, "cat", within=notes)) == 2
    assert found(index, "cat", within=notes.parent / "note") == [], "a name that begins alike"
    assert len(found(index, "cat dog", limit=1)) == 1
    for query in ("", "zebra", 'NOT "(', "*"):
        assert found(index, query) == []
    (best, *_) = index.search("cat mouse")
    assert (best.text, best.path) == ("A cat and a dog met a mouse.", notes / "b.txt")


def test_one_path_is_not_taken_for_many(
    index: DocumentIndex, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A string is no list of the paths that its characters are."""
    monkeypatch.chdir(notes.parent)
    for one in ("notes", notes, ["notes"]):
        assert list(index.update(one)) == [notes / "d.bin"]
    assert found(index, "a mouse") == [("b.txt", 0)]


def test_only_changes_are_read(index: DocumentIndex, notes: Path, read: list[str]) -> None:
    index.update([notes])
    assert read == ["a.pdf", "b.txt", "c.txt", "d.bin"]
    read.clear()
    index.update([notes / "a.pdf", notes / "b.txt"])
    assert read == []
    os.utime(notes / "b.txt", (1, 1))
    index.update([notes / "b.txt"])
    assert read == [], "the same bytes"
    (notes / "b.txt").write_text("Now a zebra.\n")
    index.update([notes / "b.txt"])
    assert read == ["b.txt"]
    assert found(index, "mouse") == []
    assert found(index, "zebra") == [("b.txt", 0)]


def test_gone_files_are_forgotten(index: DocumentIndex, notes: Path) -> None:
    index.update([notes])
    (notes / "b.txt").unlink()
    (notes / "a.pdf").write_bytes(b"%PDF- broken")
    assert set(index.update([notes])) == {notes / "a.pdf", notes / "d.bin"}
    assert found(index, "cat mouse zebra") == [("a.pdf", 1)], "it was read before it broke"
    assert found(index, "東京") == [("c.txt", 0)]
    (notes / "c.txt").unlink()
    assert list(index.update([notes / "c.txt"])) == [notes / "c.txt"]
    assert found(index, "東京") == [], "a file that is named too"


def test_index_stays(index: DocumentIndex, notes: Path, tmp_path: Path, read: list[str]) -> None:
    index.update([notes])
    if os.name == "posix":
        rights = {path.stat().st_mode & 0o077 for path in (tmp_path / "data").iterdir()}
        assert rights == {0}, "files are private"
    index.close()
    read.clear()
    with DocumentIndex(tmp_path / "data" / "documents.db") as again:
        assert found(again, "mouse") == [("b.txt", 0)]
        again.update([notes / "a.pdf"])
    assert read == []


def test_damaged_index(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match=r"documents\.db.*made again if you delete it"):
        DocumentIndex(path)


class Meanings:
    """An embedding model that knows a few words, and counts what it embeds."""

    def __init__(self, name: str, most: int = 1000) -> None:
        self.name = name
        self.most = most
        self.embedded = 0

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        if any(len(text) > self.most for text in texts):
            raise ContextOverflowError("too long")
        self.embedded += len(texts)
        rows = [[float("cat" in text or "feline" in text), 0.1, 0.0] for text in texts]
        found = np.array(rows, np.float32)
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        return found


def test_search_by_meaning(tmp_path: Path, notes: Path) -> None:
    path, model = tmp_path / "documents.db", Meanings("m")
    with DocumentIndex(path, model) as index:
        index.update([notes / "a.pdf", notes / "b.txt"])
        assert model.embedded == 3
        best = index.search("feline", 2)
        assert {(each.path.name, each.page) for each in best} == {("a.pdf", 1), ("b.txt", 0)}
        # Both rankings count: this page is first in one and among the others in the other.
        assert found(index, "feline mouse")[0] == ("b.txt", 0)
        index.update([notes])
        assert model.embedded == 3 + 2 + 1, "questions, and the new file"
    with DocumentIndex(path, other := Meanings("n")) as index:
        index.update([notes / "a.pdf"])
        assert other.embedded == 2, "of the files that were named"
        assert len(index.search("feline", 9, within=notes / "a.pdf")) == 2


def test_meaning_beside_words(tmp_path: Path, notes: Path) -> None:
    """Words that are everywhere hide none, and texts may be longer than the model reads."""
    (tmp_path / "a.pdf").write_bytes(pdf(*["The dog ran."] * 40, "A feline."))
    with DocumentIndex(tmp_path / "documents.db", Meanings("m")) as index:
        index.update([tmp_path / "a.pdf"])
        assert ("a.pdf", 41) in found(index, "the cat", limit=8)
    with DocumentIndex(tmp_path / "others.db", Meanings("m", most=10)) as index:
        index.update([notes])
        assert ("a.pdf", 1) in found(index, "feline animals")


def test_pieces_are_cut_between_words() -> None:
    first, second = "First of all. " * 8, "Second part. " * 8
    assert list(pieces(f"{first}\n\n{second}", 150)) == [first.strip(), second.strip()]
    text = "東京 " + "ab" * 30 + ". b\n\na"
    cut = list(pieces(text, 20))
    assert "".join("".join(cut).split()) == "".join(text.split())
    assert all(0 < len(each) <= 20 for each in cut)


@pytest.mark.parametrize("steps", [0, 40, 42, 43])
def test_cancelled_update(
    tmp_path: Path, notes: Path, read: list[str], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step: a file is as it was, or whole; the next update does the rest."""
    monkeypatch.setattr(indexes, "_BATCH", 16)
    path = tmp_path / "documents.db"
    before = [("a.pdf", 1), ("b.txt", 0)]
    with DocumentIndex(path) as index:
        index.update([notes])
        for name in ("a.pdf", "b.txt"):
            (notes / name).unlink()
        (notes / "a.pdf").write_bytes(pdf(*[f"The zebra {n}." for n in range(40)]))
        (notes / "b.txt").write_text("A zebra.")
        left = steps

        def progress(progress: Progress) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CancelledError("stopped")

        with pytest.raises(CancelledError, match="stopped"):
            index.update([notes], progress=progress)
        assert sorted(found(index, "cat")) in (before, [("b.txt", 0)])
    with DocumentIndex(path) as index:  # as another process would find it
        whole = not found(index, "cat", within=notes / "a.pdf")
        assert len(found(index, "zebra", limit=99)) == 40 * whole
        read.clear()
        index.update([notes])
        assert read == ([] if whole else ["a.pdf"]) + ["b.txt", "d.bin"]
        assert len(found(index, "zebra", limit=99)) == 41
        assert found(index, "cat") == []


# -- in a prompt -----------------------------------------------------------------------------------

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
    question = "Where is topic17, in more words?"
    (unkept,) = fitted([document], question, free=lambda: 1000, count=words, keep=False)
    assert not (tmp_path / "data").exists()
    (shown,) = fitted([document], question, free=lambda: 1000, count=words)
    assert shown == unkept
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
    assert short is documents[1], "it stays whole"
    assert "[report.pdf, page 4]" in long.text


def test_nothing_found_or_nothing_fits(report: Path) -> None:
    (shown,) = fitted([read_document(report)], "zebra", free=lambda: 1000, count=words)
    assert "[report.pdf, page 1]\nPage about topic0." in shown.text
    assert re.search(r"gets its first \d+ pieces, since none matches the message", shown.note)
    for document in (read_document(report), read_document(report.read_bytes(), name="a.pdf")):
        with pytest.raises(ContextOverflowError, match="does not fit the context"):
            fitted([document], "x", free=lambda: 60, count=words)
