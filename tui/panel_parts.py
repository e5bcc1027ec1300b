"""What the live panel's lines are made of: bars, lanes, a sparkline, rows with two ends.

Pure functions of numbers and a width, and ``View``, which is what there is to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content

from localrt.tui.text import human_bytes

if TYPE_CHECKING:
    from localrt import Change, Flow, Outlook, Status
    from localrt.answering.status import LaneUse, MemoryUse

__all__ = [
    "FAINT",
    "View",
    "bar",
    "ends",
    "lane",
    "milliseconds",
    "of",
    "percent",
    "row",
    "spark",
]

FAINT = "$foreground 60%"
_BARS = "▁▂▃▄▅▆▇█"
_MOST_CHANGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown. ``rates`` are tokens per second, oldest first; None: nothing is known yet."""

    status: Status | None = None
    flow: Flow | None = None
    rates: Sequence[float] = ()
    outlook: Outlook | None = None
    hide: str = ""  # the key that hides the panel

    @property
    def tok_s(self) -> float | None:
        """While generating what is reached now, later the answer's."""
        status, flow = self.status, self.flow
        if status is not None and not status.generating and status.metrics is not None:
            return status.metrics.decode_tok_s
        return None if flow is None else flow.tok_s

    @property
    def changes(self) -> list[Change]:
        """What would help. Guesses are tried all the time: nobody needs to be told of them."""
        if self.outlook is None:
            return []
        guessing = self.status is not None and self.status.metrics is not None
        guessing = guessing and self.status.metrics.speculation is not None  # type: ignore[union-attr]
        return [
            change
            for change in self.outlook.changes
            if not (guessing and change.what.startswith("speculation"))
        ][:_MOST_CHANGES]


def spark(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as bars from zero; as long as there are values."""
    shown = [max(value, 0.0) for value in values[-width:]] if width > 0 else []
    top = max(shown, default=0.0)
    return "".join(_level(value / top if top else 0.0) for value in shown)


def bar(share: float, width: int, color: str = "$accent") -> Content:
    """``━━━━────`` for a half."""
    filled = min(width, max(round(share * width), 1 if share > 0 else 0))
    return Content.assemble(("━" * filled, color), ("─" * (width - filled), FAINT))


def lane(use: LaneUse, seconds: float, width: int) -> str:
    """When it was busy, from left to right: the higher, the more of that part of the pass."""
    busy = [0.0] * width
    step = seconds / width if width else 0.0
    for start, end in use.spans if step > 0 else ():
        for cell in range(int(start / step), min(width - 1, int(end / step)) + 1):
            low, high = max(start, cell * step), min(end, (cell + 1) * step)
            busy[cell] += max(0.0, high - low)
    return "".join(_level(part / step) if part > 0.01 * step else " " for part in busy)


def of(memory: MemoryUse) -> str:
    """``127/145 MB``, in the budget's unit."""
    if memory.budget is None:
        return human_bytes(memory.used)
    number, unit = human_bytes(memory.budget).split()
    scale = 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit)
    used = memory.used / scale
    return f"{used:.{1 if used < 9.95 and unit != 'B' else 0}f}/{number} {unit}"


def _level(share: float) -> str:
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]


def row(name: str, text: str, right: str, width: int) -> Content:
    """A name, what it is, and more at the right end if there is room."""
    label = f"{name:<5}" if len(name) <= 5 else f"{name} " if text else name
    room = width - len(label) - len(text) - len(right) - 2
    if room < 0 and text:
        right = ""
    elif room < 0:
        label = f"{name[: width - len(right) - 3]}…"
    return ends(Content.assemble((label, FAINT if text else "$foreground"), text), right, width)


def ends(left: Content, right: str, width: int) -> Content:
    """``left`` and ``right`` at the two ends of a line."""
    gap = max(width - left.cell_length - len(right), 1)
    return Content.assemble(left, " " * gap, (right, FAINT)) if right else left


def percent(share: float) -> str:
    """``34 %``."""
    return f"{100 * share:.0f} %"


def milliseconds(seconds: float) -> str:
    """``9.4 ms``, ``24 ms``, ``1.2 s``."""
    return f"{seconds * 1e3:.0f} ms" if 0.0095 <= seconds < 1 else _other(seconds)


def _other(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
