"""The line that shows the progress of loading a model or reading files: stage, bar, amounts.

Knows the library's ``Progress`` and a width.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localrt.common.errors import CancelledError
from localrt.common.formatting import format_bytes
from localrt.tui.conversation.generation import BackgroundTask
from localrt.tui.text import clean, human_count
from localrt.tui.themes import FAINT

if TYPE_CHECKING:
    from localrt.common.progress import Progress, ProgressCallback

_Result = TypeVar("_Result")
_STAGES = {
    "download": "Downloading",
    "measure": "Measuring the GPU",
    "load": "Loading",
    "pack": "Packing",
    "compile": "Compiling",
    "read": "Reading",
    "index": "Indexing",
    "embed": "Embedding",
    "prefill": "Reading",
}


class LoadingLine(Widget):
    """Assign ``progress``; None means that work has begun and nothing is known yet."""

    progress: reactive[Progress | None] = reactive(None)

    def render(self) -> Content:
        return loading_line(self.progress, self.size.width)


class WorkLine(LoadingLine):
    """Shows the progress of work in a thread while it runs."""

    _work: BackgroundTask[Any] | None = None

    async def run(self, work: Callable[[ProgressCallback], _Result]) -> _Result:
        """Raises ``CancelledError`` if ``stop`` was called; the thread ends at its next step."""
        self._work = task = BackgroundTask(lambda task: work(task.step), name="localrt-work")
        task.start()
        try:
            while not (task.cancelled.is_set() or await asyncio.to_thread(task.join, 0.05)):
                self.progress, self.display = task.progress, task.progress is not None
            stopped = CancelledError("stopped: nothing was sent")
            if task.cancelled.is_set() or task.result is None:
                raise stopped if task.cancelled.is_set() else task.error or stopped
            return task.result
        finally:
            task.cancel()
            self.display = False

    def stop(self, seconds: float = 0.0) -> bool:
        """Stop the work, and wait so long for its thread; returns whether there was any."""
        if (task := self._work) is None:
            return False
        running = not task.cancelled.is_set()
        task.cancel()
        task.join(seconds)
        return running


def loading_line(progress: Progress | None, width: int) -> Content:
    """``Loading ━━━━━━━━━━────── 62%  86 MB of 138 MB  blk.12`` in ``width`` columns."""
    if progress is None:
        return Content.assemble(("Opening the model ...", FAINT))
    stage = _STAGES.get(progress.stage, clean(progress.stage).capitalize())
    amounts = _amounts(progress)
    if not progress.total:
        return Content.assemble(stage, ("  " + amounts, FAINT))
    share = min(max(progress.done / progress.total, 0.0), 1.0)
    tail = f" {share:4.0%}"
    if len(stage) + len(tail) + len(amounts) + 8 <= width:
        tail += f"  {amounts}"
    room = width - len(stage) - len(tail) - 1
    bar = max(min(room, 30), 4)
    filled = round(bar * share)
    detail = clean(progress.detail)
    rest = f"  {detail}" if detail and len(detail) + 2 <= room - bar else ""
    return Content.assemble(
        stage + " ",
        ("━" * filled, "$text-accent"),
        ("─" * (bar - filled), FAINT),
        tail,
        (rest, FAINT),
    )


def _amounts(progress: Progress) -> str:
    if not progress.unit:
        return ""

    def say(count: int) -> str:
        return format_bytes(count) if progress.unit == "bytes" else human_count(count)

    unit = "" if progress.unit == "bytes" else f" {progress.unit}"
    if progress.total is None:
        return say(progress.done) + unit
    return f"{say(progress.done)} of {say(progress.total)}{unit}"
