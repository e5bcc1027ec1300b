"""What takes time runs in threads: loading or downloading a model, and one answer.

The threads only fill these objects; the app looks at them when it draws. So the model never waits
for the screen, the screen never waits for the model, and quitting never waits for either: the
threads are daemons, told to stop and given a moment. Knows no widget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from localrt.errors import CancelledError

if TYPE_CHECKING:
    from localrt import AnswerWriter, ChatSession, Metrics, Progress

__all__ = ["AnswerUpdate", "Generation", "Task"]

_Result = TypeVar("_Result")


class Task(Generic[_Result]):
    """Calls ``work`` with itself in a thread; ``discard`` frees a result that came too late.

    ``progress`` is the latest. ``done`` says that ``result`` or ``error`` is set.
    """

    def __init__(
        self,
        work: Callable[[Task[_Result]], _Result],
        *,
        discard: Callable[[_Result], None] = lambda result: None,
    ) -> None:
        self.progress: Progress | None = None
        self.result: _Result | None = None
        self.error: Exception | None = None
        self.cancelled = threading.Event()
        self._work, self._discard = work, discard
        self._thread = threading.Thread(target=self._run, name="localrt-task", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return self.result is not None or self.error is not None

    def cancel(self) -> None:
        """Nobody wants the result any more: the work ends at its next step."""
        self.cancelled.set()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; whether it ended."""
        return _join(self._thread, seconds)

    def show(self, progress: Progress) -> None:
        """A progress callback."""
        self.progress = progress

    def show_or_stop(self, progress: Progress) -> None:
        """A progress callback that ends the work with ``CancelledError`` once it is cancelled."""
        if self.cancelled.is_set():
            raise CancelledError("loading was cancelled")
        self.progress = progress

    def _run(self) -> None:
        try:
            result = self._work(self)
        except Exception as error:  # noqa: BLE001 - whatever it is, the app shows it
            self.error = error
            return
        if self.cancelled.is_set():
            self._discard(result)
            self.error = CancelledError("loading was cancelled")
        else:
            self.result = result


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """What came since the last look. ``done`` is true once, with the last of it."""

    text: str
    metrics: Metrics | None
    prefill: Progress | None
    finish_reason: str | None
    error: Exception | None
    done: bool


class Generation:
    """Streams one answer of ``chat`` in a thread, and saves it there with ``writer``."""

    def __init__(self, chat: ChatSession, text: str, writer: AnswerWriter | None = None) -> None:
        self._chat = chat
        self._text = text
        self._writer = writer
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self._metrics: Metrics | None = None
        self._prefill: Progress | None = None
        self._finish_reason: str | None = None
        self._error: Exception | None = None
        self._done = False
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="localrt-answer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it ended: the next ``take`` has the last of it."""
        return self._done

    def cancel(self) -> None:
        """Stop soon; the text so far stays in the chat."""
        self._cancelled.set()
        self._chat.cancel()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; whether it ended."""
        return _join(self._thread, seconds)

    def take(self) -> AnswerUpdate:
        """Everything new since the last call."""
        with self._lock:
            text = "".join(self._pieces)
            self._pieces.clear()
            return AnswerUpdate(
                text, self._metrics, self._prefill, self._finish_reason, self._error, self._done
            )

    def _run(self) -> None:
        error: Exception | None = None
        try:
            for chunk in self._chat.stream(self._text, on_progress=self._on_progress):
                with self._lock:
                    self._pieces.append(chunk.text)
                    self._metrics = chunk.metrics
                    self._finish_reason = chunk.finish_reason
                if self._writer is not None:
                    self._writer.write(chunk.text)
                self._cancel_again()
        except Exception as caught:  # noqa: BLE001 - whatever it is, the app shows it
            error = caught
        with self._lock:
            self._error = error
            self._done = True

    def _on_progress(self, progress: Progress) -> None:
        self._prefill = progress
        self._cancel_again()

    def _cancel_again(self) -> None:
        # A cancel that came before the chat had begun to answer did not reach it.
        if self._cancelled.is_set():
            self._chat.cancel()


def _join(thread: threading.Thread, seconds: float) -> bool:
    if thread.ident is not None:
        thread.join(seconds)
    return not thread.is_alive()
