"""The table of models larger than memory."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Limits by engines, from ``offload.json``: the largest first, native before the others."""
    rows = sorted(
        record["rows"], key=lambda row: (-row["memory_limit"], not row["name"].endswith("native"))
    )
    lines: list[list[str]] = []
    streamers: list[tuple[str, float]] = []  # accelerate and the like: under the largest limit
    for row in rows:
        limit = row["memory_limit"]
        theirs = [
            result["decode_tok_s"]
            for other in rows
            if other["memory_limit"] == limit
            for result in other["results"]
            if result["engine"] == "llamacpp"
        ]
        for result in _best(row):
            notes, rate = [], result["decode_tok_s"]
            if result["engine"] == "native":
                notes += [f"{rate / max(theirs):.1f}x llama.cpp"] if theirs else []
                if limit == 1_000_000_000:
                    notes += [f"{rate / slow:.0f}x {name}" for name, slow in streamers]
            elif result["engine"] != "llamacpp":
                streamers.append((result["engine"], rate))
            lines.append(_line(format_bytes(limit), result, notes))
        if not row["results"]:
            for skip in row["skipped"]:
                lines.append([format_bytes(limit), skip.get("engine", ""), skip["reason"]])
                lines[-1] += [""] * 4
    return (
        f"{markdown_table(_HEADERS, lines)}\n\n`{record['command']}` on {machine_of(record)}; "
        f"medians. {versions_of(record)}."
    )


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


def _best(row: Mapping[str, Any]) -> list[Result]:
    """Each engine's fastest setting for decoding."""
    best: dict[str, Result] = {}
    for result in row["results"]:
        known = best.get(result["engine"])
        if known is None or result["decode_tok_s"] > known["decode_tok_s"]:
            best[result["engine"]] = result
    return list(best.values())
