"""Numbers and tables as every command prints them. Knows no command and no model."""

from __future__ import annotations

from collections.abc import Sequence

from localrt.offload.budget import format_bytes

__all__ = ["format_bytes", "format_count", "format_rate", "format_seconds", "table"]


def format_count(count: int) -> str:
    """A large count for people: ``"135 M"`` parameters, ``"49 k"`` tokens."""
    value = float(count)
    for unit in ("", "k", "M", "B"):
        if value < 999.5 or unit == "B":
            break
        value /= 1000
    digits = 1 if value < 9.95 and unit else 0
    return f"{value:.{digits}f} {unit}".rstrip()


def format_rate(rate: float | None) -> str:
    """A rate with about three digits (``"1156"``, ``"44.3"``, ``"0.46"``), or ``"-"`` for None."""
    if rate is None:
        return "-"
    digits = 0 if rate >= 100 else 1 if rate >= 10 else 2
    return f"{rate:.{digits}f}"


def format_seconds(seconds: float | None) -> str:
    """A duration for people: ``"12 ms"``, ``"1.5 s"``, ``"3 min 20 s"``, or ``"-"`` for None."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        milliseconds = seconds * 1000
        return f"{milliseconds:.{1 if milliseconds < 9.95 else 0}f} ms"
    if seconds < 99.5:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], align: str = "") -> str:
    """Columns two spaces apart under ``headers``, without a final newline.

    ``align`` has one letter per column, ``l`` or ``r``; columns it does not reach are ``l``. A row
    may be shorter than the header: its last cell then runs on over the columns that are missing.
    """
    columns = len(headers)
    align = align.ljust(columns, "l")
    widths = [0] * columns
    for row in (headers, *rows):
        for column, cell in enumerate(row if len(row) == columns else row[:-1]):
            widths[column] = max(widths[column], len(cell))
    lines = []
    for row in (headers, *rows):
        cells = []
        for column, cell in enumerate(row):
            width = widths[column]
            cells.append(cell.rjust(width) if align[column] == "r" else cell.ljust(width))
        if len(row) < columns:
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
