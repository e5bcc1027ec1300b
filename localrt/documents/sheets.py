"""Workbooks as tables in Markdown, by Calamine."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from typing import Any

import python_calamine

from localrt.documents.kinds import Page


def read_sheets(data: bytes) -> Page:
    """The visible sheets of a workbook as tables of values."""
    book = python_calamine.load_workbook(io.BytesIO(data))
    parts, left_out = list[str](), Counter[str]()
    for sheet in book.sheets_metadata:
        if sheet.visible != python_calamine.SheetVisibleEnum.Visible:
            left_out["hidden sheet"] += 1
        elif sheet.typ == python_calamine.SheetTypeEnum.WorkSheet:
            rows = book.get_sheet_by_name(sheet.name).to_python()
            parts.append("\n".join([f"## {sheet.name}", "", *_table(rows)]))
        else:
            left_out["chart"] += 1
    return Page("\n\n".join(parts), left_out=left_out)


def _table(rows: list[list[Any]]) -> Iterator[str]:
    for place, row in enumerate(rows):
        yield f"| {' | '.join(map(_cell, row))} |"
        if place == 0:
            yield "|" + " --- |" * len(row)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        # Excel shows 15 digits, so that 0.1 + 0.2 is 0.3.
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.15g}"
    return " ".join(str(value).replace("|", "\\|").split())
