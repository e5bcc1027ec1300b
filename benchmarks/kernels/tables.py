"""Markdown of single kernels and of passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.record import machine_of, markdown_table, versions_of
from localrt.common.formatting import format_rate

_ROWS = (1, 8, 16, 64, 512)


def kernels_table(record: Mapping[str, Any], *, every_row: bool = False) -> str:
    """The largest matrix of every format at some numbers of rows, and an expert."""
    rows = []
    for r in record["results"]:
        if not every_row and (r["rows"] not in _ROWS or r["shape"] == [4096, 4096]):
            continue
        few = r["rows"] < 8
        rows.append(
            [
                r["format"],
                "x".join(map(str, r["shape"])),
                str(r["rows"]),
                f"{r['seconds'] * 1e3:.3f}",
                format_rate(r["bytes_s"] / 1e9) if few else "",
                f"{100 * r['bytes_s'] / r['floor_bytes_s']:.0f} %" if few else "",
                "" if few else format_rate(r["operations_s"] / 1e9),
                "" if few else f"{100 * r['operations_s'] / r['peak_operations_s']:.0f} %",
                f"{r['times_ggml']:.2f}x" if r["times_ggml"] else "",
            ]
        )
    headers = ["format", "matrix", "rows", "ms", "GB/s", "of floor", "GFLOP/s", "of peak"]
    return (
        f"{markdown_table([*headers, 'times ggml'], rows)}\n\n`{record['command']}`: "
        f"{record['isa']} kernels on {machine_of(record)}; ggml's better of weights repacked and "
        f"plain. {versions_of(record)}."
    )


def passes_table(record: Mapping[str, Any]) -> str:
    """Tokens per second of a pass, by its number of rows and the context before it."""
    rows = []
    for r in record["results"]:
        theirs = r["llamacpp_s"][r["best_setting"]]
        rows.append(
            [
                str(r["held"]),
                str(r["rows"]),
                format_rate(r["rows"] / r["native_s"]),
                f"{format_rate(r['rows'] / theirs)} ({r['best_setting']})",
                f"{r['times_llamacpp']:.2f}x",
            ]
        )
    headers = ["context", "rows", "native tok/s", "llama.cpp tok/s", "ratio"]
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command']}`, on {machine_of(record)}. "
        f"{versions_of(record)}."
    )
