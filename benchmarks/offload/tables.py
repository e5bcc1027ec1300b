"""The table of models larger than memory, from ``offload.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table, versions_of
from localrt.formatting import format_bytes, format_rate

__all__ = ["offload_table"]

Result = Mapping[str, Any]

_HEADERS = (
    *("memory limit", "engine", "decode tok/s", "predicted"),
    *("pipeline busy", "read per token", "peak"),
)


def offload_table(record: Mapping[str, Any]) -> str:
    """Limits by engines, then the same model without a limit."""
    rows = {row["name"]: row for row in record["rows"]}
    parts = [_limits(rows), _unlimited(rows)]
    where, installed = machine_of(record), versions_of(record)
    parts.append(f"`{record['command']}` on {where}; medians. {installed}.")
    return "\n\n".join(part for part in parts if part)


def _limits(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines: list[list[str]] = []
    peers: list[tuple[str, float]] = []
    for row in rows.values():
        for result in _best(row):
            if row.get("memory_limit") == 2_500_000_000:
                peers.append((result["engine"], result["decode_tok_s"]))
    for row in _by_limit(rows):
        limit = row["memory_limit"]
        theirs = [r for r in _all_results(rows, limit) if r["engine"] == "llamacpp"]
        for result in _best(row):
            notes = []
            if result["engine"] == "native":
                best = max((peer["decode_tok_s"] for peer in theirs), default=None)
                notes += [f"{result['decode_tok_s'] / best:.1f}x llama.cpp"] if best else []
                if limit == 1_000_000_000:
                    notes += [f"{result['decode_tok_s'] / rate:.0f}x {n}" for n, rate in peers]
            lines.append(_line(format_bytes(limit), result, notes))
        lines += [
            [format_bytes(limit), skip.get("engine", ""), skip["reason"], "", "", "", ""]
            for skip in row["skipped"]
            if not row["results"]
        ]
    return markdown_table(_HEADERS, lines) if lines else ""


def _line(limit: str, result: Result, notes: list[str]) -> list[str]:
    rate = format_rate(result["decode_tok_s"]) + (f" ({', '.join(notes)})" if notes else "")
    busy, read = result.get("pipeline_efficiency"), result.get("read_bytes_per_token")
    peak = result.get("peak_cgroup_bytes") or result["peak_ram_bytes"]
    return [
        limit,
        f"{result['engine']} ({result['setting']})" if result["setting"] else result["engine"],
        rate,
        format_rate(result.get("predicted_tok_s")),
        "-" if busy is None else f"{100 * busy:.0f} %",
        "-" if read is None else format_bytes(read),
        format_bytes(peak),
    ]


def _unlimited(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The pipeline with nothing to stream, beside the engine that has no pipeline."""
    ours = rows.get("no limit native", {}).get("results", ())
    rates = {r["setting"]: r["decode_tok_s"] for r in ours}
    if "resident" not in rates or "pipeline" not in rates:
        return ""
    peers = rows.get("no limit llamacpp", {}).get("results", ())
    theirs = max((r["decode_tok_s"] for r in peers), default=None)
    peer = "" if theirs is None else f"; llama.cpp {format_rate(theirs)}"
    return (
        f"Without a limit: the resident engine {format_rate(rates['resident'])} tok/s, the pipeline"
        f" {format_rate(rates['pipeline'])} ({rates['pipeline'] / rates['resident']:.2f}x){peer}."
    )


def _best(row: Mapping[str, Any]) -> list[Result]:
    """Each engine's fastest setting for decoding."""
    best: dict[str, Result] = {}
    for result in row["results"]:
        known = best.get(result["engine"])
        if known is None or result["decode_tok_s"] > known["decode_tok_s"]:
            best[result["engine"]] = result
    return list(best.values())


def _by_limit(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Rows with a limit: the largest first, and native before the others."""
    limited = [row for row in rows.values() if row.get("memory_limit")]
    yield from sorted(
        limited, key=lambda row: (-row["memory_limit"], not row["name"].endswith("native"))
    )


def _all_results(rows: Mapping[str, Mapping[str, Any]], limit: int) -> Iterator[Result]:
    for row in rows.values():
        if row.get("memory_limit") == limit:
            yield from row["results"]
