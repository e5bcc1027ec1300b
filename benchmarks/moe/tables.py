"""Markdown of the results about experts: in RAM, and on the SSD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table, versions_of
from localrt.formatting import format_bytes, format_rate

__all__ = ["experts_table", "ssd_table"]

Record = Mapping[str, Any]


def experts_table(record: Record) -> str:
    """One row for each shape."""
    rows = []
    for name, result in record["results"].items():
        rates = [
            f"{found['native_tokens_s']:.0f} ({found['times_llamacpp']:.2f}x)"
            for found in (result["decode"], result["prefill"])
        ]
        rows.append([name, result["format"], str(result["layers"]), *rates])
    headers = ["shape", "format", "layers", "decode tok/s", "prefill 512 tok/s"]
    return (
        f"{markdown_table(headers, rows)}\n\n`{record['command']}`: random weights, all in RAM; in "
        "brackets, times llama.cpp at its best on the same file. "
        f"{machine_of(record)}. {versions_of(record)}."
    )


def ssd_table(record: Record) -> str:
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
        f"{markdown_table([*headers, 'read per token'], rows)}\n\n`{record['command']}`: the "
        f"trained fixture ({record['fixture']['tokens'] / 1e6:.1f} million tokens), widened to "
        f"{format_bytes(record['experts_bytes'])} of experts, on text that it has not learnt; "
        f"medians of five. {machine_of(record)}. {versions_of(record)}."
    )
