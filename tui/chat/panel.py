"""The live panel: what the model is doing, next to the conversation or above it.

It polls ``Model.status`` twice a second while an answer is generated and the panel is open, else
not at all. Its lines are pure functions of a ``PanelData`` and a size: memory, data rates, the last
pass, and what limits the speed. Next to the conversation there is room for everything; above it, on
a narrow terminal, only for the most important lines.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.timer import Timer
from textual.widget import Widget
from textual.worker import Worker

from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_bytes, format_rate, format_seconds
from localrt.tui.text import guess_texts
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt import Change, ChatModel, Flow, LaneUse, MemoryUse, Outlook, PassTrace, Status

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


_SECONDS = 0.5  # seconds between polls; each takes a few milliseconds of a core
_SIDE = 90  # from this many columns on, the panel is next to the conversation
_SIDE_ROWS = 16
_WINDOW_S = 1.0  # rates are over the last second, or the last two tokens if longer
_LONGEST_S = 30.0
_RATES = 128
_QUIET_S = 0.4


class LivePanel(Widget):
    """Hidden until ``show``. The owner sets ``model`` and reports an answer's beginning and end."""

    @dataclass
    class Shown(Message):
        """The panel was opened or hidden."""

        open: bool

    def __init__(self) -> None:
        super().__init__(id="live-panel")
        self._model: ChatModel | None = None
        self._data = PanelData()
        self._samples: deque[Status] = deque()
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._timer: Timer | None = None
        self._generating = False
        self._advising = False
        self._lines: list[Content] = []

    def on_mount(self) -> None:
        self._timer = self.set_interval(_SECONDS, self._look, pause=True)
        self._tick()

    @property
    def is_open(self) -> bool:
        return self.has_class("-open")

    def show(self, open: bool) -> None:
        if open == self.is_open:
            return
        self.set_class(open, "-open")
        if open:
            self._samples.clear()
            self._look()
            self._advise_soon()
        elif self._model is not None:
            self._status(lanes=False)  # record nothing while hidden
        self._tick()
        self.post_message(self.Shown(open))

    def take(self, model: ChatModel | None) -> None:
        self._model = model
        self._samples.clear()
        self._rates.clear()
        self._data = PanelData(hide=self._data.hide)
        if self.is_open:
            self._look()
            self._advise_soon()
        self._draw()

    def hide_key(self, key: str) -> None:
        self._data = replace(self._data, hide=key)

    def begin(self) -> None:
        self._generating = True
        self._samples.clear()
        self._rates.clear()
        self._data = replace(self._data, flow=None, rates=(), reading=True, percent=None)
        if self.is_open:
            self._look()  # the first sample, in case the answer is short
        self._tick()

    def read(self, percent: int | None) -> None:
        """Show how much of the prompt has been processed; None: all of it."""
        reading = percent is not None
        if (reading, percent) != (self._data.reading, self._data.percent):
            self._data = replace(self._data, reading=reading, percent=percent)
            self._draw()

    def end(self) -> None:
        """The answer has ended: poll once more for its final numbers."""
        self._generating = False
        self._data = replace(self._data, reading=False, percent=None)
        self._tick()
        if self.is_open:
            self._look()
            self._advise_soon()

    def fit(self, size: Size) -> None:
        self.set_class(size.width >= _SIDE and size.height >= _SIDE_ROWS, "-side")
        self._draw()

    def _tick(self) -> None:
        if self._timer is not None:
            runs = self._generating and self.is_open
            (self._timer.resume if runs else self._timer.pause)()

    def _status(self, *, lanes: bool) -> Status | None:
        try:
            return None if self._model is None else self._model.status(lanes=lanes)
        except LocalrtError:  # the model is being closed
            return None

    def _look(self) -> None:
        now = self._status(lanes=True)
        if now is None:
            return
        flow = self._flow(now)
        self._data = replace(self._data, status=now, flow=flow, rates=tuple(self._rates))
        self._draw()

    def _flow(self, now: Status) -> Flow | None:
        """The latest rates; between answers, those of the last answer."""
        samples = self._samples
        if not samples or now.clock_s < samples[-1].clock_s:
            samples.clear()
            samples.append(now)
            return self._data.flow
        if not now.generating and not self._generating:
            return now.since(samples[0]) if now.tokens > samples[0].tokens else self._data.flow
        first = samples[-1].tokens == samples[0].tokens == now.tokens
        flow = now.since(samples[0])
        if first:  # no rate during prefill
            samples.clear()
            samples.append(now)
            return None if not self._rates else self._data.flow
        samples.append(now)
        while len(samples) > 2 and self._enough(now, samples[1]):
            samples.popleft()
        if flow.tok_s is not None:
            self._rates.append(flow.tok_s)
        return flow

    @staticmethod
    def _enough(now: Status, since: Status) -> bool:
        seconds = now.clock_s - since.clock_s
        return seconds >= _LONGEST_S or (seconds >= _WINDOW_S and now.tokens - since.tokens >= 2)

    def _advise_soon(self) -> None:
        """Ask for advice once the app is idle: a message may be waiting."""
        self.set_timer(_QUIET_S, self._advise)

    def _advise(self) -> None:
        """Ask once per model what would speed it up, while idle, in a thread."""
        model = self._model
        if model is None or self._generating or self._advising or self._data.outlook is not None:
            return
        self._advising = True

        async def ask() -> None:
            outlook: Outlook | None = None
            try:
                outlook = await asyncio.to_thread(model.advise)
            except LocalrtError:
                pass
            finally:
                self._advising = False
            if outlook is not None and model is self._model:
                status = self._status(lanes=self.is_open) or self._data.status
                self._data = replace(self._data, status=status, outlook=outlook)
                self._draw()

        _: Worker[None] = self.run_worker(ask, group="advise", exit_on_error=False)

    def _draw(self) -> None:
        if not self.is_open:
            return
        if not self.has_class("-side"):
            rows = len(strip_lines(self._data, 80)) + 1  # with its border
            if self.styles.height is None or self.styles.height.cells != rows:
                self.styles.height = rows
        elif self.styles.has_rule("height"):
            self.styles.clear_rule("height")
        before, self._lines = self._lines, self._text()
        if len(before) != len(self._lines):
            self.refresh()
            return
        pairs = enumerate(zip(before, self._lines, strict=True))
        changed = [y for y, (old, new) in pairs if not old.is_same(new)]
        if changed:  # drawing is expensive
            self.refresh(*(Region(0, y, self.content_size.width, 1) for y in changed))

    def _text(self) -> list[Content]:
        width, height = self.content_size
        if self.has_class("-side"):
            return side_lines(self._data, width, height)
        return strip_lines(self._data, width)

    def render(self) -> Content:
        self._lines = self._text()
        return Content("\n").join(self._lines)
