"""The table of mixtures that are all in RAM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.record import machine_of, markdown_table, versions_of

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
