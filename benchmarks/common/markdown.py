"""Markdown of results: tables, and the line below them that says what was run and where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(
        f"|{'|'.join(cells)}|" if cells is lines[1] else f"| {' | '.join(cells)} |"
        for cells in lines
    )


def machine_of(record: Mapping[str, Any]) -> str:
    """The processor and its cores."""
    cpu = record["machine"]["cpu"]
    return f"{cpu['name']}, {cpu['usable_cores']} cores"


def versions_of(record: Mapping[str, Any]) -> str:
    """What was installed."""
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())
