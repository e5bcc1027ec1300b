"""One line on stderr that says how far long work is: downloads, loading, training, batches."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from localrt.common.closing import Closing
from localrt.common.formatting import format_bytes, format_count, format_seconds
from localrt.common.option_names import on_command_line, spelled
from localrt.common.progress import NOTE, Progress

_VERBS = {
    "download": "downloading",
    "verify": "checking",
    "measure": "measuring the card",
    "pack": "packing",
    "load": "loading",
    "compile": "compiling",
    "losses": "measuring what formats cost",
    "write": "writing text",
    "train": "training",
}


class StatusLine(Closing):
    """A line that is rewritten on a terminal (``live``); elsewhere nothing is shown."""

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty() if live is None else live

    def show(self, text: str) -> None:
        """Replace the line."""
        if self.live:
            self.stream.write(f"\r\x1b[K{text}")
            self.stream.flush()

    def close(self) -> None:
        """Leave a clean line."""
        self.show("")


class ProgressLine(StatusLine):
    """Shows each ``Progress`` that it is called with.

    Without a terminal it says at the end what was downloaded, or shows a line every ``plain_s``
    seconds where that is given.
    """

    def __init__(self, stream: TextIO | None = None, *, plain_s: float | None = None) -> None:
        super().__init__(stream)
        self._plain_s = plain_s
        self._stage = ""
        self._started = self._shown = 0.0
        self._first = 0
        self._download_s = 0.0
        self.downloaded = 0

    def __call__(self, progress: Progress) -> None:
        """Show one step. What an earlier run had done does not count for the rate."""
        if progress.stage == NOTE:
            self.show("")
            line = spelled(progress.detail, on_command_line)
            print(f"localrt: {line}", file=self.stream, flush=True)
            return
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._started, self._first = progress.stage, now, progress.done
            self._shown = now
        elapsed = now - self._started
        if progress.stage == "download":
            self.downloaded, self._download_s = progress.done, elapsed
        if self.live:
            self.show(describe(progress, self._first, elapsed))
        elif self._plain_s is not None and now - self._shown >= self._plain_s:
            self._shown = now
            print(describe(progress, self._first, elapsed), file=self.stream, flush=True)

    def close(self) -> None:
        """Leave a clean line; without a terminal, say what was downloaded."""
        super().close()
        if not self.live and self.downloaded:
            size, time_ = format_bytes(self.downloaded), format_seconds(self._download_s)
            print(f"downloaded {size} in {time_}", file=self.stream)


def describe(progress: Progress, first: int, elapsed_s: float) -> str:
    """``downloading model.gguf  43 %  42 MB of 98 MB  12 MB/s  5 s left``, at most 100 columns."""
    is_bytes = progress.unit == "bytes"
    size = format_bytes if is_bytes else format_count
    unit = "" if is_bytes else f" {progress.unit}"
    name = f" {progress.detail.rpartition('/')[2][-40:]}" if is_bytes else ""
    parts = [f"{_VERBS.get(progress.stage, progress.stage)}{name}"]
    total = progress.total
    if total:
        parts.append(f"{100 * progress.done // total} %")
        parts.append(f"{size(progress.done)} of {size(total)}{unit}")
    else:
        parts.append(f"{size(progress.done)}{unit}")
    rate = (progress.done - first) / elapsed_s if elapsed_s > 0.2 else 0.0
    if rate > 0:
        if rate >= 1:
            parts.append(f"{size(int(rate))}/s")
        if total:
            left = (total - progress.done) / rate
            parts.append(f"{f'{left:.0f} s' if left < 99.5 else format_seconds(left)} left")
    if progress.detail and not is_bytes:
        parts.append(progress.detail)
    return "  ".join(parts)
