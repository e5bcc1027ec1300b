"""Rewrites the tables of README and docs from the results in ``benchmarks/results``.

    python -m benchmarks.tables [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, in README.md or any page of
docs/. NAME is that of a results file (``offload``, ``bench-smollm2``: a JSON of ``localrt bench``),
or one of several tables of a file (``quality-full``); ``headline`` is made from several files.
``--check`` changes nothing and fails when a table is not what its results say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import RESULTS, ROOT, make_parser
from benchmarks.common.record import machine_of, markdown_table, versions_of
from benchmarks.cpu.tables import cpu_table, times
from benchmarks.drafts.__main__ import drafts_table
from benchmarks.gpu.tables import compiled_table, gpu_tables
from benchmarks.kernels.tables import kernels_table, passes_table
from benchmarks.moe.tables import experts_table
from benchmarks.offload import offload_table
from benchmarks.published import published_table
from benchmarks.quality.tables import full_tables, short_table
from benchmarks.towers.__main__ import towers_table
from localrt.common.formatting import format_bytes, format_rate, format_seconds

_TABLE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def bench_table(record: dict[str, Any]) -> str:
    """The best setting of each engine of a ``localrt bench --json``.

    Ratios are to llama.cpp's best figure of the column, whichever setting reached it.
    """
    best = [result for result in record["results"] if result["best"]]
    peers = [r for r in record["results"] if r["engine"] == "llamacpp"] or best

    def rated(result: dict[str, Any], key: str) -> str:
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
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command'].removesuffix(' --json')}`: "
        f"{record['prompt_tokens']} prompt and {record['tokens']} answer tokens, median of "
        f"{record['runs']}, on {machine_of(record)}. {versions_of(record)}."
    )


def headline_table() -> str:
    """What the README shows: one model in memory and within a limit, with AVX2."""
    rows: list[list[str]] = []

    def row(what: str, ours: float, theirs: float, ik: str = "") -> None:
        ratio = f"{ours / theirs:.1f}x"
        rates = [f"{format_rate(rate)} tok/s" for rate in (ours, theirs)]
        rows.append([what, *rates, ratio, ik])

    for what, speeds in _in_memory("avx2"):
        row(what, *speeds)
    limited = _read("offload")
    best = {
        (result["engine"], each["memory_limit"]): result["decode_tok_s"]
        for each in limited["rows"]
        for result in each["results"]
        if each.get("memory_limit") and result["best"]
    }
    limit = 700_000_000
    what = f"Qwen2.5-1.5B Q4_K_M within {format_bytes(limit)}, decode"
    row(what, best["native", limit], best["llamacpp", limit])
    headers = ["", "localrt", "llama.cpp, best settings", "ratio", "times ik_llama.cpp"]
    table = markdown_table(headers, rows)
    measured = [limited, _read("cpu-avx2")]
    machines = dict.fromkeys(machine_of(each) for each in measured)
    return f"{table}\n\nMedians on {'; '.join(machines)}. {versions_of(limited)}."


def _in_memory(isa: str) -> Iterator[tuple[str, tuple[float, float, str]]]:
    """Rates of localrt and llama.cpp, and the ratio to ik_llama.cpp."""
    wanted = {f"Qwen2.5-1.5B Q4_K_M, {what}" for what in ("prompt of 512", "decode")}
    for row in _read(f"cpu-{isa}")["rows"]:
        if row["name"] in wanted and "llama.cpp" in row["peers"]:
            theirs = row["peers"]["llama.cpp"]["tok_s"]["median"]
            yield row["name"], (row["localrt"]["median"], theirs, times(row, "ik_llama.cpp"))


def mix_table(record: dict[str, Any]) -> str:
    """Each server's applications: requests, goals met, times to the first token."""
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
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command']}`, {record['servers'][0]['runs']} "
        f"run: {alls.replace('%', ' %')} requests met their goals, on {machine_of(record)}. "
        f"{versions_of(record)}."
    )


def resume_table(record: dict[str, Any]) -> str:
    """A long conversation's saved KV cache against computing it again."""
    rows = [
        [
            f"{row['tokens']:,} tokens of {row['model'].removesuffix('.gguf')} ({row['saved']})",
            f"{row['resume_s']:.2f} s, {row['faster']:.0f}x",
            f"{row['resume_cold_s']:.2f} s, {row['faster_cold']:.0f}x",
        ]
        for row in record["results"]
    ]
    headers = ["from the disk, times as fast as computed again", "in the page cache", "not cached"]
    return f"{markdown_table(headers, rows)}\n\nMedians on {machine_of(record['results'][-1])}."


# Of a file's tables, the one with its name, and others.
_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "bench": bench_table,
    "compiled": compiled_table,
    "cpu": cpu_table,
    "experts": experts_table,
    "gpu_check": gpu_tables,
    "kernels": kernels_table,
    "drafts": drafts_table,
    "offload": offload_table,
    "passes": passes_table,
    "published": published_table,
    "quality": short_table,
    "quality-full": full_tables,
    "mix": mix_table,
    "resume": resume_table,
    "towers": towers_table,
}


def filled(text: str) -> str:
    """``text`` with every table made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{_table(match[2])}\n{match[3]}"

    return _TABLE.sub(fill, text)


def _table(name: str) -> str:
    if name == "headline":
        return headline_table()
    kind = name.partition("-")[0]
    path = RESULTS / f"{kind if name in _TABLES else name}.json"
    if not path.exists():
        return f"Not measured yet: run python -m benchmarks.{kind}."
    make = _TABLES.get(name) or _TABLES[kind]
    return make(_read(path.stem))


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def pages() -> Iterator[Path]:
    """Those that may have tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite, or check."""
    parser = make_parser(__doc__, json=False)
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
