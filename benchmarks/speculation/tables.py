"""The tables of speculation, from ``speculation.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import machine_of, markdown_table, versions_of
from localrt.formatting import format_bytes, format_rate

__all__ = ["speculation_short", "speculation_table"]

Record = Mapping[str, Any]


def speculation_table(record: Record) -> str:
    """Every row."""
    parts = (_rows(record), _notes(record), _footer(record))
    return "\n\n".join(part for part in parts if part)


def speculation_short(record: Record) -> str:
    """What was measured at temperature 0, beside something else."""
    rows = [
        [f"{row['name']}: {result['what']}", f"{_value(result)} {result['unit']}"]
        for row in record["rows"]
        for result in row["results"]
        if not result.get("temperature")
    ]
    return f"{markdown_table(['setting', 'measured'], rows)}\n\n{_footer(record)}"


def _rows(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        for result in row["results"]:
            per_pass = result.get("tokens_per_pass")
            rows.append(
                [
                    row["name"],
                    result["what"],
                    f"{_value(result)} {result['unit']}",
                    _rates(result),
                    "" if per_pass is None else f"{per_pass:.1f}",
                    _prompts(row),
                ]
            )
        if not row["results"]:
            rows.append([row["name"], f"not measured: {row['skipped']}", "", "", "", ""])
    headers = ["setting", "", "measured", "tok/s, before", "tokens a pass", "prompts"]
    return markdown_table(headers, rows)


def _value(result: Record) -> str:
    return f"{result['value']:.2f}" if result["unit"].startswith("x") else f"{result['value']:.1f}"


def _rates(result: Record) -> str:
    if "tok_s" not in result:
        return ""
    return f"{format_rate(result['tok_s'])}, {format_rate(result['plain_tok_s'])}"


def _prompts(row: Record) -> str:
    rounds = f" x {row['rounds']}" if row["rounds"] > 1 else ""
    return f"{row['prompts']}{rounds}, {row['tokens']} tokens"


def _notes(record: Record) -> str:
    lines = []
    for row in record["rows"]:
        if "draft_bytes" in row:
            lines.append(
                f"- {row['name']}: {format_bytes(row['limit_bytes'])} for the target, and "
                f"{format_bytes(row['draft_bytes'])} more, which the draft adds to a process."
            )
        for result in row["results"]:
            if "repeated_share" in result:
                lines.append(
                    f"- {row['name']}: {result['repeated_share']:.0%} of an answer's runs of four "
                    "tokens stand in its prompt (median)."
                )
    return "\n".join(lines)


def _footer(record: Record) -> str:
    checks = [row["checked"] for row in record["rows"] if row.get("checked")]
    made = sum(check["generations"] for check in checks)
    same = sum(check["same_tokens"] for check in checks)
    minutes = sum(row["seconds"] for row in record["rows"]) / 60
    return (
        f"`{record['command']}` on {machine_of(record)}, {minutes:.0f} "
        f"minutes; medians of prompts; target {record['target']}, draft {record['draft']}. {same} "
        f"of {made} generations have the tokens of plain decoding. {versions_of(record)}."
    )
