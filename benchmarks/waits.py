"""How long users wait: for a file's first opening, a launched program, documents, and a long
conversation that comes back from the disk.

    python -m benchmarks.waits [--runs 5] [--only WORD] [--json FILE]

A launched program is a script that ends at once, beside a server with the model smollm2: what is
timed is localrt's part. Documents are PDFs whose pages have text. A conversation is timed to the
first token of its next turn, in a process that has the model loaded: read again; with its saved
cache in the system's page cache; and with those pages dropped, which needs no root.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import localrt
from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.memory_limit import drop_from_cache
from benchmarks.common.record import Results, captioned, markdown_table
from localrt import DocumentIndex
from localrt.common.processes import localrt_command
from localrt.documents.reading import read_document
from localrt.models.first_opening import check_first

_LINE = "The store keeps what was packed and brings it back in the order in which it came: {}."
_LINES, _PAGES, _MOST_PAGES, _TOKENS = 50, 300, 10_000, 7600


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and save."""
    args = make_parser(__doc__, runs=5, results="waits", rows=True).parse_args(arguments)
    results = Results(args.json, cited_command("waits", arguments))
    for name in results.pending(WAITS, args.only, args.again):
        with (
            tempfile.TemporaryDirectory(dir=Path.home()) as folder,
            WAITS[name](Path(folder)) as once,
        ):
            once()
            seconds = statistics.median(_timed(once) for _ in range(args.runs))
        results.put({"name": name, "seconds": seconds}, WAITS)
    print(waits_table(results.record))
    return 0


def waits_table(record: Mapping[str, Any]) -> str:
    """The table of waits."""
    rows = [[row["name"], f"{row['seconds']:.2g} s"] for row in record["rows"]]
    return captioned(record, markdown_table(["wait for", "median"], rows))


def _timed(once: Callable[[], object]) -> float:
    began = time.perf_counter()
    once()
    return time.perf_counter() - began


@contextmanager
def _first_opening(model: str, folder: Path) -> Iterator[Callable[[], object]]:
    path, caches = find_model(model), count()
    yield lambda: check_first(path, folder / f"{next(caches)}")


@contextmanager
def _launch(folder: Path) -> Iterator[Callable[[], object]]:
    program = folder / "aider"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    env |= {"LOCALRT_CACHE": f"{folder}/cache", "XDG_DATA_HOME": f"{folder}/data"}
    serve = localrt_command("serve", str(find_model("smollm2")), "--port", "0")
    with subprocess.Popen(serve, env=env, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None, "it is a pipe"
        server.stdout.readline()  # it is ready
        command, none = localrt_command("launch", "aider"), subprocess.DEVNULL
        try:
            yield lambda: subprocess.run(command, env=env, check=True, stderr=none)
        finally:
            server.terminate()


@contextmanager
def _reading(folder: Path) -> Iterator[Callable[[], object]]:
    file = pdf(folder / "report.pdf", _PAGES)
    yield lambda: read_document(file)


@contextmanager
def _asking(pages: int, known: bool, folder: Path) -> Iterator[Callable[[], object]]:
    """Ask for what a PDF says, with a new index each time, or with one that has it."""
    file, names = pdf(folder / "report.pdf", pages), count()

    def once() -> None:
        with closing(DocumentIndex(folder / f"{0 if known else next(names)}.db")) as index:
            index.update([file])
            assert index.search(f"in the order {pages}", within=file), "all pages have the words"

    yield once


@contextmanager
def _conversation(model: str, how: str, folder: Path) -> Iterator[Callable[[], object]]:
    """The next turn of a conversation of ``_TOKENS`` tokens."""
    with (
        patch.dict(os.environ, {"LOCALRT_CACHE": str(folder)}),
        localrt.load(find_model(model), ctx=_TOKENS + 256) as loaded,
    ):
        messages: list[localrt.Message] = []
        while not messages or loaded.count(messages) < _TOKENS - 350:
            turn = len(messages) // 2
            messages.append({"role": "user", "content": f"{turn}: {_LINE.format(turn) * 13}"})
            messages.append({"role": "assistant", "content": f"{turn}: yes."})

        def once() -> None:
            if how == "not cached":
                _forget_pages(folder)
            chat = loaded.chat()
            chat.messages = list(messages)
            metrics = chat.send("And then?", max_tokens=1, temperature=0.0).metrics
            chat.close()
            if (metrics.cached_tokens > _TOKENS // 2) != (how != "read again"):
                raise SystemExit(f"{metrics.cached_tokens} tokens came back")

        if how != "read again":
            chat = loaded.chat()
            chat.messages = list(messages)
            chat.send("Why?", max_tokens=1, temperature=0.0)
            chat.park()
        yield once


def _forget_pages(folder: Path) -> None:
    """Have the system drop the saved cache's pages, after they have been written to disk."""
    files = list(folder.rglob("blocks.bin"))
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    drop_from_cache(files)


def pdf(file: Path, pages: int) -> Path:
    """Write a PDF. Readers find its objects without a table of their places."""
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", font]
    for page in range(pages):
        lines = (f"({_LINE.format(page * _LINES + line)}) ' " for line in range(_LINES))
        text = f"BT /F1 9 Tf 14 TL 40 800 Td {''.join(lines)}ET"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 850] /Contents {5 + 2 * page} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(text)} >>\nstream\n{text}\nendstream",
        ]
    kids = " ".join(f"{4 + 2 * page} 0 R" for page in range(pages))
    objects[1] = f"<< /Type /Pages /Kids [{kids}] /Count {pages} >>"
    body = "".join(f"{number} 0 obj\n{each}\nendobj\n" for number, each in enumerate(objects, 1))
    file.write_text(f"%PDF-1.4\n{body}trailer << /Root 1 0 R >>\n%%EOF\n", encoding="utf-8")
    return file


WAITS: dict[str, Callable[[Path], AbstractContextManager[Callable[[], object]]]] = {
    "first opening of SmolLM2-135M (98 MB, 49,152 tokens)": partial(_first_opening, "smollm2"),
    "first opening of Qwen2.5-0.5B (491 MB, 151,936 tokens)": partial(_first_opening, "qwen0.5b"),
    "`localrt launch`, to the program's start": _launch,
    "a PDF of 300 pages, read": _reading,
    "300 pages, indexed and asked": partial(_asking, _PAGES, False),
    "10,000 pages, indexed and asked": partial(_asking, _MOST_PAGES, False),
    "10,000 pages, asked again": partial(_asking, _MOST_PAGES, True),
    **{
        f"a long conversation's next turn, {title}, {how}": partial(_conversation, model, how)
        for model, title in (("qwen1.5b", "Qwen2.5-1.5B"), ("smollm2", "SmolLM2-135M"))
        for how in ("read again", "from the page cache", "not cached")
    },
}

if __name__ == "__main__":
    sys.exit(main())
