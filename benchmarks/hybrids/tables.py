"""The tables of hybrids, from ``hybrids.json``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table, versions_of
from localrt.formatting import format_bytes, format_rate, format_seconds

__all__ = ["flash_next_table", "hybrids_table", "remembering_table"]

_PEERS = ("llama.cpp", "ik_llama.cpp")


def hybrids_table(record: Mapping[str, Any]) -> str:
    """Models in memory and streamed: tokens a second, and how many times a peer's."""
    lines = []
    for row in record["rows"]:
        model, _, what = row["name"].partition(" ")
        found = row["results"]
        if what == "in memory":
            for key in ("prompt", "decode"):
                times = [found.get(f"times_{peer}", {}).get(key) for peer in _PEERS]
                ratios = ["" if one is None else f"{one:.2f}x" for one in times]
                ours = format_rate(found["medians"]["localrt"][key])
                lines.append([model, f"in memory, {key}", ours, *ratios])
        elif what == "streamed":
            limit, size = format_bytes(found["limit"]), format_bytes(found["file"])
            where = f"within {limit} of {size}, decode"
            ours = format_rate(found["native"]["median"])
            lines.append([model, where, ours, f"{found['times']:.1f}x", ""])
    headers = ["model", "", "tok/s", *(f"times {peer}" for peer in _PEERS)]
    return f"{markdown_table(headers, lines)}\n\n{_setting(record)}"


def flash_next_table(record: Mapping[str, Any]) -> str:
    """Rows of a table of n-grams in a model that is streamed, from ``flash_next.json``."""
    headers = [
        *("file", "budget", "peak", "decode", "prompt of 512", "read per token"),
        *("of that the table", "rows asked for", "waited for", "share of a token"),
    ]
    lines = [
        [
            *(format_bytes(row[key]) for key in ("file", "budget", "peak")),
            *(f"{format_rate(row[key])} tok/s" for key in ("median", "prompt_tok_s")),
            *(format_bytes(row[key]) for key in ("read_bytes", "rows_bytes")),
            *(format_seconds(row[key]) for key in ("rows_asked_s", "rows_waited_s")),
            f"{100 * row['share']:.2f} %",
        ]
        for row in record["rows"]
    ]
    return f"{markdown_table(headers, lines)}\n\n{_setting(record)}"


def remembering_table(record: Mapping[str, Any]) -> str:
    """What states are worth: edits, restarts, guesses, and a context to its end."""
    lines = []
    for row in record["rows"]:
        model, _, what = row["name"].partition(" ")
        found = row["results"]
        if what == "edited":
            ours, theirs = (_median(found["samples"][name]) for name in ("localrt", "llama.cpp"))
            text = f"the last {found['edited']} of {found['tokens']:,} tokens changed, first token"
            lines.append([model, text, ours, f"{theirs} (llama.cpp)", f"{found['times']:.0f}x"])
        elif what == "resumed":
            ours, theirs = (_median(found["samples"][name]) for name in ("resumed", "read"))
            text = f"a chat of {found['tokens']:,} tokens after a restart, first token"
            lines.append([model, text, ours, f"{theirs} (read again)", f"{found['times']:.0f}x"])
        elif what == "guessing":
            for key, times in found["times"].items():
                ours, theirs = (
                    format_rate(statistics.median(one[key] for one in found["samples"][name]))
                    for name in ("guessing", "plain")
                )
                text = f"tok/s with guesses, {key}"
                lines.append([model, text, ours, f"{theirs} (without)", f"{times:.2f}x"])
        elif what == "filled":
            peak, most = format_bytes(found["peak"]), format_bytes(found["budget"])
            text = f"{found['tokens']:,} tokens read within {most}: peak RAM"
            lines.append([model, text, peak, "", ""])
    return markdown_table(["model", "", "localrt", "beside", ""], lines)


def _median(samples: list[float]) -> str:
    return format_seconds(sorted(samples)[len(samples) // 2])


def _setting(record: Mapping[str, Any]) -> str:
    return (
        f"`{record['command']}` on {machine_of(record)}; medians of five, ratios turn by turn. "
        f"{versions_of(record)}."
    )
