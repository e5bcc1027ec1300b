"""Tables of studies that were made once: their results are kept, their programs are not.

What they showed stands in the docs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table, versions_of
from localrt.formatting import format_bytes, format_rate, format_seconds

__all__ = [
    "STUDIES",
    "flash_next_table",
    "hybrids_table",
    "remembering_table",
    "ssd_table",
    "types_table",
]

STUDIES = frozenset({"experts_ssd", "flash_next", "hybrids", "types"})
"""Names of their JSON files."""


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
        f"Measured once on {machine_of(record)}; medians of five, ratios turn by turn. "
        f"{versions_of(record)}."
    )


def ssd_table(record: Mapping[str, Any]) -> str:
    """One row for each engine and share of the experts."""
    rows = []
    for row in record["results"]:
        peers = [
            other["tok_s"]
            for other in record["results"]
            if other["share"] == row["share"] and other["engine"] == "llamacpp"
        ]
        ahead = peers and row["engine"] == "native"
        hits = row["hit_rate"]
        rows.append(
            [
                f"{100 * row['share']:.0f} % of the experts",
                format_bytes(row["limit_bytes"]),
                row["engine"],
                format_rate(row["tok_s"])
                + (f" ({row['tok_s'] / max(peers):.1f}x)" if ahead else ""),
                format_rate(row["predicted_tok_s"]),
                "-" if hits is None else f"{100 * hits:.0f} %",
                format_bytes(row["read_bytes_per_token"]),
            ]
        )
    headers = ["RAM for", "memory limit", "engine", "tok/s", "predicted", "experts in memory"]
    return (
        f"{markdown_table([*headers, 'read per token'], rows)}\n\nMeasured once: a "
        f"small mixture ({record['fixture']['tokens'] / 1e6:.1f} million tokens of training), "
        f"widened to {format_bytes(record['experts_bytes'])} of experts, on text that it has not "
        f"learnt; "
        f"medians of five. {machine_of(record)}. {versions_of(record)}."
    )


def types_table(record: Mapping[str, Any]) -> str:
    """Tokens a second, and how many times a peer's."""
    lines = []
    for row in record["rows"]:
        found = row["results"]
        for key in ("decode", "prompt"):
            times = [found.get(f"times_{peer}", {}).get(key) for peer in _PEERS]
            lines.append(
                [
                    f"{row['name']}, {format_bytes(found['file'])}",
                    key if key == "decode" else "prompt of 512",
                    format_rate(found["medians"]["localrt"][key]),
                    *("" if one is None else f"{one:.2f}x" for one in times),
                ]
            )
    headers = ["type", "", "tok/s", *(f"times {peer}" for peer in _PEERS)]
    place = f"on {machine_of(record)}. {versions_of(record)}."
    return f"{markdown_table(headers, lines)}\n\nMeasured once {place}"
