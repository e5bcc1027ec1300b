"""The live panel as lines of text: memory, data rates, the last pass, and what limits the speed.

Pure functions of a ``PanelData`` and a size. Next to the conversation there is room for everything;
above it, on a narrow terminal, only for the most important lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content

from localrt.common.formatting import format_bytes, format_rate, format_seconds
from localrt.tui.text import guess_texts
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt import Change, Flow, LaneUse, MemoryUse, Outlook, PassTrace, Status

_BARS = "▁▂▃▄▅▆▇█"
_MOST_CHANGES = 3
_HEADING = "$text-primary bold"
_COLORS = {"ssd": "$warning", "link": "$secondary", "cpu": "$primary", "gpu": "$success"}
_NAMES = {"ssd": "SSD", "link": "Link", "cpu": "CPU", "gpu": "GPU"}
_NO_NUMBERS = "The model is loading, or runs elsewhere"
_FULL = 0.9  # from this share of a budget on, the colour is a warning
_GUESSED = 1.05  # from this many tokens per pass on, draft tokens matter


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelData:
    """The data to show; None if unknown. ``rates`` are tokens per second, oldest first.

    ``reading``: the prompt is being processed, ``percent`` of it so far.
    """

    status: Status | None = None
    flow: Flow | None = None
    rates: Sequence[float] = ()
    outlook: Outlook | None = None
    hide: str = ""  # the key that hides the panel
    reading: bool = False
    percent: int | None = None

    @property
    def tok_s(self) -> float | None:
        """The answer's mean rate so far, as in the footer; ``rates`` are the latest ones."""
        if self.reading or self.status is None or self.status.metrics is None:
            return None
        return self.status.metrics.decode_tok_s

    @property
    def changes(self) -> list[Change]:
        changes = () if self.outlook is None else self.outlook.changes
        return list(changes)[:_MOST_CHANGES]

    @property
    def guesses(self) -> tuple[str, str] | tuple[()]:
        """Draft tokens as text (``guess_texts``), of the current answer only."""
        return guess_texts(None if self.status is None or self.reading else self.status.metrics)

    @property
    def possible(self) -> str:
        """How the rate compares with the machine's limit: reading and computing all weights per
        token. The limit is computed from measurements, which may be a little low.

        Accepted draft tokens save passes: they may raise the rate far above that limit.
        """
        status, tok_s = self.status, self.tok_s
        if status is None or tok_s is None or not status.ceiling_tok_s:
            return ""
        most = max(status.ceiling_tok_s, tok_s / status.per_pass)
        share, rate = tok_s / most, format_rate(most)
        if status.per_pass < _GUESSED:
            return f"{_percent(min(share, 1.0))} of the {rate} possible here"
        times = f"{share:.1f}x the" if share >= 1 else f"{_percent(share)} of"
        return f"{times} {rate} possible without drafts"


def side_lines(data: PanelData, width: int, height: int) -> list[Content]:
    """The panel as a column of at most ``height`` lines."""
    status = data.status
    sections = [[_title(data, width)]]
    if status is None:
        sections.append([Content.styled(_NO_NUMBERS, FAINT)])
    else:
        sections += [
            _rate(data, width),
            list(_memory(status, width)),
            list(_flows(data, width)),
            list(_pass(status.last_pass, width)),
            list(_why(data, width)),
            list(_help(data, width)),
        ]
    sections = [section for section in sections if section]
    while len(sections) > 2 and sum(map(len, sections)) > height:
        sections.pop()
    gap = sum(map(len, sections)) + len(sections) - 1 <= height
    lines: list[Content] = []
    for section in sections:
        if lines and gap:
            lines.append(Content(""))
        lines += section
    return [line.truncate(width, ellipsis=True) for line in lines[:height]]


def _title(data: PanelData, width: int) -> Content:
    status = data.status
    live = status is None or status.generating or data.reading
    text = "Live" if live else "Idle"
    if status is not None and not live and status.metrics is not None:
        text = "Last answer"
    return _ends(Content.styled(text, _HEADING), f"{data.hide} hides" if data.hide else "", width)


def _rate(data: PanelData, width: int) -> list[Content]:
    status, tok_s = data.status, data.tok_s
    assert status is not None
    if tok_s is None:
        ceiling = status.ceiling_tok_s
        lines = [Content(_state(data))]
        if ceiling:
            lines.append(Content.styled(f"At most {format_rate(ceiling)} tok/s here", FAINT))
        return lines
    lines = [_rate_line(f"{format_rate(tok_s)} tok/s", data.rates, width)]
    if data.possible:
        lines.append(Content.styled(data.possible, FAINT))
    if status.predicted_tok_s and status.per_pass < _GUESSED and status.streamed:
        lines.append(Content.styled(f"{format_rate(status.predicted_tok_s)} were forecast", FAINT))
    return lines


def _state(data: PanelData) -> str:
    """The model's state, in the footer's words, shown while there is no rate."""
    if not data.reading:
        return "No tokens yet"
    return "Reading prompt" + ("" if data.percent is None else f" {data.percent} %")


def _rate_line(text: str, rates: Sequence[float], width: int) -> Content:
    line = sparkline(rates, width - len(text) - 2)
    return Content.assemble((text, "bold"), "  ", (line, "$success"))


def _memories(status: Status) -> list[tuple[str, MemoryUse]]:
    """The memories that the model uses, by name."""
    memories = (("VRAM", status.vram), ("RAM", status.ram), ("KV", status.kv))
    return [(name, memory) for name, memory in memories if memory is not None]


def _memory(status: Status, width: int) -> Iterator[Content]:
    for name, memory in _memories(status):
        share, room, bar = memory.share, width - 5 - 14, Content("")
        if share is not None and room > 0:
            bar = _bar(share, room, "$warning" if share > _FULL and name != "KV" else "$accent")
        yield Content.assemble((f"{name:<5}", FAINT), bar, f"{memory_text(memory):>14}")


def _flows(data: PanelData, width: int) -> Iterator[Content]:
    status, flow = data.status, data.flow
    assert status is not None
    if status.streamed and flow is not None:
        for name, rate in (("SSD", flow.ssd_bytes_s), ("Link", flow.link_bytes_s)):
            if rate is None or (name == "Link" and status.vram is None):
                continue
            more = ""
            if name == "SSD" and flow.pass_bytes:
                more = f"{format_bytes(round(flow.pass_bytes))} per pass"
            yield _row(name, f"{rate / 1e9:.1f} GB/s", more, width)
    hits = None if flow is None else flow.expert_hit_rate
    if hits is None and status.metrics is not None:
        hits = status.metrics.expert_hit_rate
    if hits is not None:
        yield _row("Experts", f"{_percent(hits)} in memory", "", width)
    yield from _guesses(data, width)


def _guesses(data: PanelData, width: int) -> Iterator[Content]:
    if texts := data.guesses:
        yield _row("Guessed", *texts, width)


def _pass(last: PassTrace | None, width: int) -> Iterator[Content]:
    if last is None or last.seconds <= 0:
        return
    waited = last.waited_s / last.seconds
    yield _ends(
        Content.assemble("Last pass ", (format_seconds(last.seconds), "bold")),
        f"waited {format_seconds(last.waited_s)}, {_percent(waited)}",
        width,
    )
    for use in last.lanes:
        yield _lane_line(use, last.seconds, width)


def _lane_line(use: LaneUse, seconds: float, width: int) -> Content:
    share = f"{_percent(use.busy_s / seconds):>5}"
    room = max(width - 5 - len(share) - 1, 4)
    return Content.assemble(
        (f"{_NAMES.get(use.resource, use.resource):<5}", FAINT),
        (lane_text(use, seconds, room), _COLORS.get(use.resource, "$foreground")),
        " ",
        share,
    )


def _why(data: PanelData, width: int) -> Iterator[Content]:
    if data.flow is None or not data.flow.why or data.tok_s is None:
        return
    yield Content.styled("Why not faster", _HEADING)
    yield from map(Content, textwrap.wrap(data.flow.why, max(width, 8)))


def _help(data: PanelData, width: int) -> Iterator[Content]:
    if changes := data.changes:
        yield Content.styled("What would help", _HEADING)
        yield from (_row(each.what, "", f"{each.gain:.1f}x", width) for each in changes)


def strip_lines(data: PanelData, width: int) -> list[Content]:
    """The panel as three to five lines over the whole width."""
    status = data.status
    if status is None:
        return [_ends(Content.styled(_NO_NUMBERS, FAINT), "", width)]
    possible = data.possible
    text = _state(data) if data.tok_s is None else f"{format_rate(data.tok_s)} tok/s"
    lines = [
        _ends(_rate_line(text, data.rates, width - len(possible) - 2), possible, width),
        _memory_strip(status, width),
        *_lanes_strip(status, data.flow, width),
    ]
    lines += _guesses(data, width)
    lines.append(_why_strip(data, width))
    return [line.truncate(width, ellipsis=True) for line in lines]


def _memory_strip(status: Status, width: int) -> Content:
    shown = _memories(status)
    each = (width - 2 * (len(shown) - 1)) // max(len(shown), 1)
    pieces: list[Content | str] = []
    for name, memory in shown:
        text, share = memory_text(memory), memory.share
        room = each - len(name) - len(text) - 2
        bar = _bar(share, room) if share is not None and room >= 3 else Content("")
        gap = " " if bar.plain else ""
        pieces += ["  " if pieces else "", Content.assemble((f"{name} ", FAINT), bar, gap, text)]
    return Content.assemble(*pieces)


def _lanes_strip(status: Status, flow: Flow | None, width: int) -> Iterator[Content]:
    last = status.last_pass
    if last is None or last.seconds <= 0:
        return
    rates = {"ssd": flow.ssd_bytes_s, "link": flow.link_bytes_s} if flow is not None else {}
    for use in last.lanes:
        rate = rates.get(use.resource)
        tail = f"  {rate / 1e9:.1f} GB/s" if rate is not None else ""
        if use.resource in ("cpu", "gpu") and not tail:
            tail = f"  waited {_percent(last.waited_s / last.seconds)}"
        drawn = _lane_line(use, last.seconds, width - 13)
        yield Content.assemble(drawn, (f"{tail:<13}", FAINT))


def _why_strip(data: PanelData, width: int) -> Content:
    why = data.flow.why if data.flow is not None and data.tok_s is not None else ""
    best = data.changes[:1]
    tail = f"{best[0].what}: {best[0].gain:.1f}x" if best else ""
    short = why.partition(",")[0].partition(":")[0].rstrip(".")
    if not why:
        return _ends(Content.styled(tail and f"Would help: {tail}", FAINT), "", width)
    if tail and len(short) + len(tail) + 3 > width:
        return Content(short)
    return _ends(Content(short), tail, width)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as bars from zero; shorter if there are fewer values."""
    shown = [max(value, 0.0) for value in values[-width:]] if width > 0 else []
    top = max(shown, default=0.0)
    return "".join(_level(value / top if top else 0.0) for value in shown)


def _bar(share: float, width: int, color: str = "$accent") -> Content:
    """``━━━━────`` for a half."""
    filled = min(width, max(round(share * width), 1 if share > 0 else 0))
    return Content.assemble(("━" * filled, color), ("─" * (width - filled), FAINT))


def lane_text(use: LaneUse, seconds: float, width: int) -> str:
    """A lane's busy share in each part of the pass, as bars from left to right."""
    busy = [0.0] * width
    step = seconds / width if width else 0.0
    for start, end in use.spans if step > 0 else ():
        for cell in range(int(start / step), min(width - 1, int(end / step)) + 1):
            low, high = max(start, cell * step), min(end, (cell + 1) * step)
            busy[cell] += max(0.0, high - low)
    return "".join(_level(part / step) if part > 0.01 * step else " " for part in busy)


def memory_text(memory: MemoryUse) -> str:
    """Used and total memory in the budget's unit: ``127/145 MB``."""
    if memory.budget is None:
        return format_bytes(memory.used)
    number, unit = format_bytes(memory.budget).split()
    scale = 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit)
    used = memory.used / scale
    return f"{used:.{1 if used < 9.95 and unit != 'B' else 0}f}/{number} {unit}"


def _level(share: float) -> str:
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]


def _row(name: str, text: str, right: str, width: int) -> Content:
    """A name, a text, and a right-aligned text if there is room."""
    label = f"{name:<5}" if len(name) <= 5 else f"{name} " if text else name
    room = width - len(label) - len(text) - len(right) - 2
    if room < 0 and text:
        right = ""
    elif room < 0:
        label = f"{name[: width - len(right) - 3]}…"
    return _ends(Content.assemble((label, FAINT if text else "$foreground"), text), right, width)


def _ends(left: Content, right: str, width: int) -> Content:
    """``left`` and ``right`` at the two ends of a line."""
    gap = max(width - left.cell_length - len(right), 1)
    return Content.assemble(left, " " * gap, (right, FAINT)) if right else left


def _percent(share: float) -> str:
    """``34 %``."""
    return f"{100 * share:.0f} %"
