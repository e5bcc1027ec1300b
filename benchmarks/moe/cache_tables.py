"""Markdown tables of what ``benchmarks.moe.cache`` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.markdown import markdown_table, versions_of
from localrt.formatting import format_rate

__all__ = ["cache_tables"]

Record = Mapping[str, Any]


def cache_tables(record: Record) -> str:
    """Hit rates, then decoding and prompts on each CPU."""
    parts = [_hit_rates(record["hit_rates"])] if record["hit_rates"] else []
    for cpu in dict.fromkeys(result["cpu"] for result in record["results"]):
        for phase in ("decode", "prompt"):
            rows = [r for r in record["results"] if (r["cpu"], r["phase"]) == (cpu, phase)]
            if rows:
                parts += [f"Simulated tok/s, {phase}, CPU: {cpu}", _times(rows)]
    parts.append(
        f"`{record['command']}`; {record['card']}, link of {record['link']}, {record['format']}; "
        f"times are simulated. {versions_of(record)}."
    )
    return "\n\n".join(parts)


def _hit_rates(rows: Sequence[Record]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["hit_rates"]))
    lines = []
    for row in rows:
        rates = {name: 100 * rate for name, rate in row["hit_rates"].items()}
        lines.append(
            [
                row["trace"],
                f"{100 * row['cached']:.0f} %",
                *(f"{rates[name]:.1f}" if name in rates else "-" for name in names),
                f"{rates['learned'] - rates['lru']:+.1f}",
                f"{rates['belady'] - rates['learned']:.1f}",
            ]
        )
    headers = ["trace", "cached", *names, "learned over lru", "learned below belady"]
    return markdown_table(headers, lines)


def _times(rows: Sequence[Record]) -> str:
    names = list(dict.fromkeys(row["scheduler"] for row in rows))
    lines = []
    for trace, cached in dict.fromkeys((row["trace"], row["cached"]) for row in rows):
        found = {
            row["scheduler"]: row["tok_s"]
            for row in rows
            if (row["trace"], row["cached"]) == (trace, cached)
        }
        best = max(rate for name, rate in found.items() if name.startswith("hybrid"))
        cells = [format_rate(found[name]) for name in names]
        ratio = f"{best / found['static']:.2f}x"
        lines.append([trace, f"{100 * cached:.0f} %", *cells, ratio])
    return markdown_table(["trace", "cached", *names, "best hybrid / static"], lines)
