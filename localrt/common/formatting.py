"""Formats and parses sizes, numbers and tables. Knows no command and no model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from localrt.common.errors import OptionError

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY_UNITS = {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ud800-\udfff"
CONTROL = re.compile(f"[{_CONTROLS}]")  # of a terminal, or of the direction
_INVISIBLE = "\t\n\xad\u061c\u200b-\u200f\u2060-\u2065\ufeff\U000e0000-\U000e007f"
UNSEEN = re.compile(f"[{_CONTROLS}{_INVISIBLE}]")  # also line ends, tabs and what is not seen
_SIZE = re.compile(r"(\d{1,30}(?:\.\d+)?|\.\d+)\s*([KMGT]I?)?B?", re.IGNORECASE)


def paired(text: str) -> str:
    """``text`` with U+FFFD for lone surrogates, which JSON may hold, and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_size(size: str | int, of: str = "") -> int:
    """Bytes of ``"8GB"`` (decimal), ``"512MiB"`` (binary), ``"1.5 G"``, ``"4096"`` or ``4096``.

    ``of`` names the option in the message.

    Raises:
        OptionError: not a size, or not positive.
    """
    # In Python bool is an int, but it is not a size.
    if isinstance(size, int) and not isinstance(size, bool):
        value = size
    else:
        match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
        if match is None:
            said = f"{of} must be a size, is {size!r:.80}" if of else f"{size!r:.80} is not a size"
            raise OptionError(f"{said}: write it like 8GB, 1.5GB or 512MiB")
        unit = (match[2] or "").upper()
        value = round(float(match[1]) * {**_UNITS, **_BINARY_UNITS}[unit])
    if value <= 0:
        raise OptionError(f"{of or 'a size'} must be above zero, is {size!r:.80}")
    return value


def parse_duration(text: str, of: str = "") -> float:
    """Seconds of ``"30s"``, ``"5m"``, ``"2h"`` or ``"300"``; a negative number means for ever.

    ``of`` names the option in the message.

    Raises:
        OptionError: not a duration.
    """
    match = re.fullmatch(r"(-?\d{1,30}(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match is None:
        said = f"{of} must be a time, is {text!r:.80}" if of else f"{text!r:.80} is not a duration"
        raise OptionError(f"{said}: write it like 30s, 5m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def format_bytes(count: float) -> str:
    """A size for people, in decimal units with two or three digits: ``"98 MB"``, ``"1.1 GB"``."""
    text, unit = _scaled(abs(count), ("B", "kB", "MB", "GB", "TB"))
    return f"{'-' if count < 0 else ''}{text.removesuffix('.0')} {unit}"


def format_count(count: int) -> str:
    """A large count for people: ``"135 M"`` parameters, ``"49 k"`` tokens."""
    return " ".join(_scaled(count, ("", "k", "M", "B"))).rstrip()


def _scaled(value: float, units: Sequence[str]) -> tuple[str, str]:
    """Format ``value`` with two or three digits in a fitting unit, by steps of 1000."""
    step = 0
    while value >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.{1 if value < 9.95 and step else 0}f}", units[step]


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


def one_line(text: object, limit: int = 200) -> str:
    """Untrusted text for use in one line: printable, folded, cut at ``limit`` characters."""
    line = " ".join(str(text).split())
    line = "".join(each for each in line if each.isprintable())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def printable(text: str) -> str:
    """``text`` for a terminal: control and direction characters are spelled out. Line ends and tabs
    stay.
    """
    return CONTROL.sub(_spelled, text)


def as_line(text: str) -> str:
    """``text`` as one line: line ends, tabs and what is not seen are spelled out, too."""
    return UNSEEN.sub(_spelled, text)


def join_lines(lines: Iterable[str]) -> str:
    """A text of these lines, each shown ``as_line``."""
    return "\n".join(map(as_line, lines))


def _spelled(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def indented(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """The lines of a ``table`` without headers, indented by two spaces."""
    return [f"  {line}" for line in table(rows, ("",) * len(rows[0]), align).split("\n")[1:]]


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], align: str = "") -> str:
    """Format a table: columns two spaces apart under ``headers``, without a final newline.

    ``align`` has one letter per column, ``l`` or ``r``; further columns are ``l``. The last cell of
    a row shorter than the header spans the missing columns. Cells are shown ``as_line``.
    """
    rows = [[as_line(cell) for cell in row] for row in rows]
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
