"""The tables of ``docs/gpu.md``, from the JSON of ``scripts/gpu_check``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.common.record import markdown_table, versions_of

Record = Mapping[str, Any]

# Values of a check that can make it fail.
_REASONS = re.compile("error|bound|equal|sequential|peak|estimate|finite|same")


_TABLES: tuple[tuple[str, str, Mapping[str, tuple[str, str]]], ...] = (
    (
        "batches ((?:int4-g32|nf4|mxfp4|nvfp4|q2_k|q4_k|q6_k|q8_0|iq4_xs) .*)",
        "times cuBLAS in bf16, rows",
        {str(rows): (f"against_cublas_{rows}", "{:.2f}x") for rows in (1, 8, 16, 32, 64)},
    ),
    (
        "resident (.*)",
        "resident, shape of Qwen2.5 1.5B",
        {
            "decode tok/s": ("decode_tok_s_graph", "{:.0f}"),
            "without CUDA graphs": ("decode_tok_s_plain", "{:.0f}"),
            "prefill tok/s": ("prefill_tok_s", "{:.0f}"),
        },
    ),
    (
        "(adapters), decode",
        "adapters of rank 16",
        {
            f"{title}, {chats} at once": (f"{key}_{chats}{end}", shown)
            for chats in (1, 8)
            for title, key, end, shown in (
                ("tok/s without", "tok_s", "_plain", "{:.1f}"),
                ("with one each", "tok_s", "_adapted", "{:.1f}"),
                ("takes longer by", "cost", "", "{:.0%}"),
            )
        },
    ),
    (
        "tower (.*)",
        "tower, a picture of 896 x 896",
        {
            "s": ("s", "{:.3f}"),
            "s without cuBLAS": ("s_without_cublas", "{:.3f}"),
            "s on its CPU": ("cpu_s", "{:.2f}"),
            "MB of the GPU": ("gpu_mb", "{:.0f}"),
        },
    ),
    (
        "loaded (.*)",
        "within 8 GB, or as named",
        {
            "decode tok/s": ("decode_tok_s", "{:.1f}"),
            "forecast": ("predicted_tok_s", "{:.1f}"),
            "off by": ("forecast_error", "{:+.0%}"),
            "first token of 512, s": ("first_token_512_s", "{:.2f}"),
            "at first, s": ("first_token_512_at_first_s", "{:.2f}"),
            "of 2048, s": ("first_token_2048_s", "{:.2f}"),
            "prompt tok/s, forecast": ("predicted_prefill_tok_s", "{:.0f}"),
            "CPU busy": ("cpu_busy", "{:.0%}"),
            "disk busy": ("ssd_busy", "{:.0%}"),
            "loading, s": ("load_s", "{:.0f}"),
        },
    ),
)
"""Tables: pattern of result names, title, and column headers with keys and formats."""


def gpu_tables(record: Record) -> str:
    """Tables of a record: date and machine, failed checks, checks that did not run, speeds."""
    results = record["results"]
    machine = record["machine"]
    passed = sum(result["ok"] for result in results)
    head = (
        f"`{record['command']}` on {record['date']}, one {machine['device']}, CUDA "
        f"{machine['cuda']}, driver {machine['driver']}, {versions_of(record)}: {passed} of "
        f"{len(results)} checks passed in {record['seconds']:.0f} seconds."
    )
    failed = [f"- {each['name']}: {_why(each)}" for each in results if not each["ok"]]
    found = {each["name"]: each["values"] for each in results if "error" not in each["values"]}
    missing = [f"- {name}: {v['not run']}" for name, v in found.items() if "not run" in v]
    parts = [head, *(["Failed:", "\n".join(failed)] if failed else [])]
    parts += ["Not run:", "\n".join(missing)] if missing else []
    facts = [
        [f"{name}, {key}", _number(value)]
        for name, values in found.items()
        if name.startswith("facts")
        for key, value in values.items()
        if isinstance(value, float)
    ]
    parts += [markdown_table(["fact", "measured"], facts)] if facts else []
    return "\n\n".join([*parts, *filter(None, (_table(found, *each) for each in _TABLES))])


def _table(record: Record, pattern: str, title: str, shown: Mapping[str, tuple[str, str]]) -> str:
    """One table; empty if there are no results to show."""
    cells = {
        match[1]: [
            form.format(values[key]) if key in values else "" for key, form in shown.values()
        ]
        for name, values in record.items()
        if (match := re.fullmatch(pattern, name))
    }
    cells = {name: each for name, each in cells.items() if any(each)}
    used = [n for n in range(len(shown)) if any(each[n] for each in cells.values())]
    headers = [title, *([*shown][n] for n in used)]
    rows = [[name, *(each[n] for n in used)] for name, each in cells.items()]
    return markdown_table(headers, rows) if rows else ""


def _why(result: Record) -> str:
    values = result["values"]
    if "error" in values:
        return str(values["error"]).split(". ")[0]
    told = {name: value for name, value in values.items() if _REASONS.search(name)} or values
    return ", ".join(f"{name} {_number(value)}" for name, value in told.items())


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
