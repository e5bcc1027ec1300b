"""What the benchmark of waits reads."""

from __future__ import annotations

from pathlib import Path

from benchmarks.waits import pdf
from localrt import DocumentIndex
from localrt.documents.reading import read_document


def test_its_document_has_pages_that_are_found(tmp_path: Path) -> None:
    file = pdf(tmp_path / "report.pdf", 3)
    assert read_document(file).text.count("[page ") == 3
    with DocumentIndex(tmp_path / "index.db") as index:
        assert not index.update([file])
        assert {piece.page for piece in index.search("in the order", limit=99)} == {1, 2, 3}
