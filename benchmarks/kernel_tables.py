"""README's tables of single kernels and of passes, from the JSON of those two benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localrt.formatting import format_rate

__all__ = ["kernels_table", "passes_table"]

_ROWS = (1, 8, 16, 64, 512)


def kernels_table(record: Mapping[str, Any]) -> str:
    """The largest matrix of every format at some numbers of rows, and an expert."""
    lines = [
        "| format | matrix | rows | ms | GB/s | of floor | GFLOP/s | of peak | times ggml |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in record["results"]:
        if r["rows"] not in _ROWS or r["shape"] == [4096, 4096]:
            continue
        few = r["rows"] < 8
        cells = [
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
        lines.append(f"| {' | '.join(cells)} |")
    cpu = record["machine"]["cpu"]
    peers = record["llama_cpp_python"]
    lines += [
        "",
        f"`{record['command'].rstrip()}`: {record['isa']} kernels on {cpu['name']}, "
        f"{cpu['usable_cores']} cores; ggml of llama-cpp-python {peers}, its better of weights "
        "repacked and plain.",
    ]
    return "\n".join(lines)


def passes_table(record: Mapping[str, Any]) -> str:
    """Tokens per second of a pass of each number of rows behind each context."""
    lines = [
        "| context | rows | native tok/s | llama.cpp tok/s | ratio |",
        "|---|---|---|---|---|",
    ]
    for r in record["results"]:
        theirs = r["llamacpp_s"][r["best_setting"]]
        cells = [
            str(r["held"]),
            str(r["rows"]),
            format_rate(r["rows"] / r["native_s"]),
            f"{format_rate(r['rows'] / theirs)} ({r['best_setting']})",
            f"{r['times_llamacpp']:.2f}x",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    cpu, versions = record["machine"]["cpu"], record["versions"]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines += [
        "",
        f"`{record['command']}`, on {cpu['name']}, {cpu['usable_cores']} cores. {installed}.",
    ]
    return "\n".join(lines)
