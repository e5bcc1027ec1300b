"""The live panel: what the model is doing, next to the conversation or above it.

It polls the model twice a second while an answer is generated and the panel is open, else not at
all. ``panel_lines.py`` writes its text; the numbers come from ``Model.status``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.timer import Timer
from textual.widget import Widget
from textual.worker import Worker

from localrt.common.errors import LocalrtError
from localrt.tui.chat.panel_lines import PanelData, side_lines, strip_lines

if TYPE_CHECKING:
    from localrt import ChatModel, Flow, Outlook, Status

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
