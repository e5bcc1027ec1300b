"""The table of published speeds and forecasts, from ``published.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import markdown_table, versions_of
from localrt.common.formatting import format_rate


def published_table(record: Mapping[str, Any]) -> str:
    """Model and file, machine and engine as far as they were named, published and planned speed."""
    lines = [
        [
            f"{row['called']} {row['file']}".rstrip(),
            _machine(row),
            row["engine"] or "not named",
            f"{row['ctx']:,}, {row['kv']}" if row["ctx"] else "not named",
            " ".join(filter(None, (format_rate(row["tok_s"]), _beside(row)))),
            format_rate(row["forecast_tok_s"]),
        ]
        for row in record["rows"]
    ]
    headers = ["model", "machine", "engine", "context, KV", "tok/s published", "tok/s forecast"]
    return (
        f"{markdown_table(headers, lines)}\n\n`{record['command']}`, {versions_of(record)}; "
        "forecasts are simulated, and nothing was run."
    )


def _machine(row: Mapping[str, Any]) -> str:
    card = row["card"] or "a card of 8 GB"
    return f"{card}, {row['ram']} of RAM" if row["ram"] else card


def _beside(row: Mapping[str, Any]) -> str:
    return f"({row['also']})" if row["also"] else ""
