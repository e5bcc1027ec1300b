"""Rewrites the tables of README and docs from the results in ``benchmarks/results``.

    python -m benchmarks.tables [--check]

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->``, in README.md or any page of docs/.
NAME is a results file (``offload``, ``cpu-avx2``); ``headline`` is made from several files, and
``launch-PROGRAM`` from the row of ``localrt launch``.
``--check`` changes nothing and fails if a table does not match its results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import claims_table
from benchmarks.common.command import RESULTS, ROOT
from benchmarks.common.record import Record, markdown_table, versions_of
from benchmarks.cpu.__main__ import cpu_table, times
from benchmarks.drafts import drafts_table
from benchmarks.offload import offload_table
from benchmarks.quality.__main__ import quality_table
from benchmarks.waits import waits_table
from localrt.client.programs import find_program, recipe
from localrt.common.formatting import format_rate

_TABLE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def headline_table() -> str:
    """The README's table: one model in memory and within a limit, with AVX2."""
    in_memory, limited, model = read("cpu-avx2"), read("offload"), "Qwen2.5-1.5B Q4_K_M"
    known = {row["name"]: row for row in (*in_memory["rows"], *limited["rows"])}
    lines = []
    for name in (f"{model}, prompt of 512", f"{model}, decode"):
        row = known[name]
        theirs = row["peers"]["llama.cpp"]["tok_s"]["median"]
        lines.append((name, row["localrt"]["median"], theirs, times(row, "ik_llama.cpp")))
    both = (known[f"700 MB {engine}"]["decode_tok_s"] for engine in ("native", "llamacpp"))
    lines.append((f"{model} within 700 MB, decode", *both, ""))
    rows = [
        [what, *(f"{format_rate(rate)} tok/s" for rate in (a, b)), f"{a / b:.1f}x", ik]
        for what, a, b, ik in lines
    ]
    headers = ["", "localrt", "llama.cpp, best settings", "ratio", "times ik_llama.cpp"]
    machines = "; ".join(dict.fromkeys((limited["machine"], in_memory["machine"])))
    return f"{markdown_table(headers, rows)}\n\nMedians on {machines}. {versions_of(limited)}."


_TABLES: dict[str, Callable[[Record], str]] = {
    "claims": claims_table,
    "cpu": cpu_table,
    "drafts": drafts_table,
    "offload": offload_table,
    "quality": quality_table,
    "waits": waits_table,
}
"""Table functions by the prefix of the results file's name."""


def filled(text: str) -> str:
    """``text`` with every table regenerated."""

    def fill(match: re.Match[str]) -> str:
        name, (kind, _, rest) = match[2], match[2].partition("-")
        if kind == "launch":
            return f"{match[1]}\n{recipe(find_program(rest))}\n\n{match[3]}"
        made = headline_table() if name == "headline" else _TABLES[kind](read(name))
        return f"{match[1]}{made}\n{match[3]}"

    return _TABLE.sub(fill, text)


def read(name: str) -> dict[str, Any]:
    """A results file.

    Raises:
        SystemExit: the file does not exist.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"a table is to show {path.name}, which is not in {path.parent}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def pages() -> Iterator[Path]:
    """The pages that may have tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite, or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail when a table is out of date")
    check = parser.parse_args(arguments).check
    stale = False
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if check and new != old:
            print(f"the tables of {page.name} are out of date: run python -m benchmarks.tables")
            stale = True
        elif new != old:
            page.write_text(new, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
