"""How long documents take: 300 pages of PDF and of Word, and 10,000 pages in twenty files.

    python -m tests.documents.speed [RUNS]

prints seconds to read one as text, to index it, to search it, and the same for all; medians of
``RUNS`` (5) for the one. It is a command, not a test.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from localrt import DocumentIndex, read_document
from tests.documents.samples import docx, paragraph, pdf

LINES, WORDS = 50, 12  # of a page, and of a line
QUESTION = "where is abcdef, and what of the others"


def document(pages: int, seed: int) -> bytes:
    """A PDF of random words, and of one that all pages have."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(5000)]

    def page() -> str:
        lines = (" ".join(rng.choices(words, k=WORDS)) for _ in range(LINES))
        return "\n".join(["abcdef", *lines])

    return pdf(*(page() for _ in range(pages)))


def word(pages: int) -> bytes:
    """A Word document of random words, six paragraphs a page."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(5000)]
    return docx("".join(paragraph(" ".join(rng.choices(words, k=80))) for _ in range(6 * pages)))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        one = folder / "one.pdf"
        one.write_bytes(document(300, 0))
        print("characters:", len(read_document(one).text))
        print(
            "read 300 pages:",
            statistics.median(seconds(lambda: read_document(one)) for _ in range(runs)),
        )
        written = word(300)
        reading = (seconds(lambda: read_document(written, name="a.docx")) for _ in range(runs))
        print("read 300 pages of Word:", statistics.median(reading))
        taken: dict[str, list[float]] = {"index": [], "search": []}
        for run in range(runs):
            with DocumentIndex(folder / f"{run}.db") as index:
                taken["index"].append(seconds(lambda: index.update([one])))
                taken["search"].append(seconds(lambda: index.search(QUESTION)))
        print({name: statistics.median(each) for name, each in taken.items()})
        many = folder / "many"
        many.mkdir()
        for number in range(20):
            (many / f"{number}.pdf").write_bytes(document(500, number + 1))
        with DocumentIndex(folder / "many.db") as index:
            print("index 10,000 pages:", seconds(lambda: index.update([many])))
            print("search them:", seconds(lambda: index.search(QUESTION)))
            print("nothing changed:", seconds(lambda: index.update([many])))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
