"""Rewrites the tables of README and docs from the results in ``benchmarks/results``.

    python -m benchmarks.tables [--check]

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->``, in README.md or any page of docs/.
NAME is a results file (``offload``, or ``bench-smollm2``, a JSON of ``localrt bench``);
``headline`` is made from several files, and ``launch-PROGRAM`` from the row of ``localrt launch``.
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
from benchmarks.common.record import Record, captioned, machine_of, markdown_table, versions_of
from benchmarks.cpu.__main__ import cpu_table, times
from benchmarks.drafts.__main__ import drafts_table
from benchmarks.gpu.tables import gpu_tables
from benchmarks.kernels.__main__ import kernels_table
from benchmarks.offload import offload_table
from benchmarks.published import published_table
from benchmarks.quality.__main__ import quality_table
from benchmarks.resume import resume_table
from benchmarks.routing import routing_table
from benchmarks.waits import waits_table
from localrt.client.programs import find_program, recipe
from localrt.common.formatting import format_bytes, format_rate, format_seconds

_TABLE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def bench_table(record: Record) -> str:
    """The best setting of each engine of a ``localrt bench --json``.

    Ratios are relative to llama.cpp's best figure of the column, in whatever setting.
    """
    best = [result for result in record["results"] if result["best"]]
    peers = [r for r in record["results"] if r["engine"] == "llamacpp"] or best

    def rated(result: Record, key: str) -> str:
        ratio = result[key] / max(peer[key] for peer in peers)
        return f"{format_rate(result[key])} ({ratio:.2f}x)"

    rows = [
        [
            f"{result['engine']} ({result['setting'] or result['info'].get('format', '')})",
            rated(result, "prefill_tok_s"),
            rated(result, "decode_tok_s"),
            format_seconds(result["ttft_s"]),
            format_bytes(result["peak_ram_bytes"]),
        ]
        for result in best
    ]
    headers = ["engine", "prefill tok/s", "decode tok/s", "first token", "peak RAM"]
    about = (
        f"{record['prompt_tokens']} prompt and {record['tokens']} answer tokens, median of "
        f"{record['runs']},"
    )
    return captioned(record, markdown_table(headers, rows), about)


def headline_table() -> str:
    """The README's table: one model in memory and within a limit, with AVX2."""
    in_memory, limited, model = read("cpu-avx2"), read("offload"), "Qwen2.5-1.5B Q4_K_M"
    known = {row["name"]: row for row in in_memory["rows"]}
    lines = [
        (name, row["localrt"]["median"], row["peers"]["llama.cpp"]["tok_s"]["median"],
         times(row, "ik_llama.cpp"))
        for name in (f"{model}, prompt of 512", f"{model}, decode")
        for row in [known[name]]
    ]  # fmt: skip
    limit = 700_000_000
    best = {
        result["engine"]: result["decode_tok_s"]
        for row in limited["rows"]
        if row["memory_limit"] == limit
        for result in row["results"]
        if result["best"]
    }
    what = f"{model} within {format_bytes(limit)}, decode"
    lines.append((what, best["native"], best["llamacpp"], ""))
    rows = [
        [what, *(f"{format_rate(rate)} tok/s" for rate in (a, b)), f"{a / b:.1f}x", ik]
        for what, a, b, ik in lines
    ]
    headers = ["", "localrt", "llama.cpp, best settings", "ratio", "times ik_llama.cpp"]
    machines = dict.fromkeys(map(machine_of, (limited, in_memory)))
    table = markdown_table(headers, rows)
    return f"{table}\n\nMedians on {'; '.join(machines)}. {versions_of(limited)}."


def mix_table(record: Record) -> str:
    """A table of each server's applications: requests, goals met, times to first token."""
    rows = [
        [
            server["server"],
            app["app"],
            str(app["requests"]),
            f"{app['goals_met']:.0%}".replace("%", " %"),
            *(format_seconds(app["ttft_s"][name]) for name in ("p50", "p95")),
            format_rate(app["tokens_s"]),
        ]
        for server in record["servers"]
        for app in server["apps"]
    ]
    headers = ["server", "application", "requests", "goals met", "first token", "p95", "tok/s"]
    alls = ", ".join(f"{s['goals_met']:.0%} of {s['server']}'s" for s in record["servers"])
    about = f"{record['servers'][0]['runs']} run, goals met by {alls.replace('%', ' %')} requests,"
    return captioned(record, markdown_table(headers, rows), about)


_TABLES: dict[str, Callable[[Record], str]] = {
    "bench": bench_table,
    "cpu": cpu_table,
    "drafts": drafts_table,
    "gpu_check": gpu_tables,
    "kernels": kernels_table,
    "mix": mix_table,
    "offload": offload_table,
    "published": published_table,
    "quality": quality_table,
    "claims": claims_table,
    "resume": resume_table,
    "routing": routing_table,
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
