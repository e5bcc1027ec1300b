"""What takes time runs in threads: loading or downloading a model, and one answer.

The threads only fill these objects; the app looks at them when it draws. So the model never waits
for the screen, the screen never waits for the model, and quitting never waits for either: the
threads are daemons, told to stop and given a moment. Knows no widget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from localrt.common.errors import CancelledError
from localrt.common.progress import NOTE, Progress
from localrt.mcp.toolbox import Toolbox
from localrt.tui.conversation.tool_calls import stream_answer

if TYPE_CHECKING:
    from localrt import AnswerWriter, ChatModel, ChatSession, Metrics, ToolCall
    from localrt.common.progress import ProgressCallback

SERVERS = "servers"  # the stage of progress in which MCP servers start

_Result = TypeVar("_Result")


class Task(Generic[_Result]):
    """Calls ``work`` with itself in a thread, whose ``progress`` is the latest.

    ``done`` says that ``result`` or ``error`` is set.
    """

    def __init__(
        self, work: Callable[[Task[_Result]], _Result], *, name: str = "localrt-task"
    ) -> None:
        self.progress: Progress | None = None
        self._notes: list[str] = []
        self.result: _Result | None = None
        self.error: Exception | None = None
        self.cancelled = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

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
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def show(self, progress: Progress) -> None:
        """A progress callback."""
        if progress.stage == NOTE:
            self._notes.append(progress.detail)
        else:
            self.progress = progress

    def take_notes(self) -> list[str]:
        """Lines to be said, each once."""
        taken, self._notes = self._notes, []
        return taken

    def _run(self) -> None:
        try:
            self.result = self._work(self)
        except Exception as error:  # noqa: BLE001 - whatever it is, the app shows it
            self.error = error


def loading(load: Callable[[ProgressCallback], ChatModel]) -> Task[ChatModel]:
    """Loads a model; one that is there when nobody wants it any more is closed again."""

    def work(task: Task[ChatModel]) -> ChatModel:
        def show(progress: Progress) -> None:
            if task.cancelled.is_set():
                raise CancelledError("loading was cancelled")
            task.show(progress)

        model = load(show)
        if task.cancelled.is_set():
            model.close()
            raise CancelledError("loading was cancelled")
        return model

    return Task(work)


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """What came since the last look. ``done`` is true once, with the last of it."""

    text: str
    metrics: Metrics | None
    prefill: Progress | None
    finish_reason: str | None
    error: Exception | None
    done: bool
    calls: tuple[ToolCall, ...] = ()


class Generation(Task[bool]):
    """Streams one answer of ``chat`` in a thread, and saves it there with ``writer``.

    ``text`` is None where the results of tools are answered. The model is offered the tools of
    ``toolbox``, once its servers have started; ``last`` says that it may call no more of them.
    """

    def __init__(
        self,
        chat: ChatSession,
        text: str | None,
        writer: AnswerWriter | None = None,
        toolbox: Toolbox | None = None,
        *,
        last: bool = False,
    ) -> None:
        super().__init__(lambda task: self._stream(text), name="localrt-answer")
        self._chat = chat
        self._writer = writer
        self._toolbox = toolbox
        self._last = last
        self._calls: tuple[ToolCall, ...] = ()
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self._metrics: Metrics | None = None
        self._finish_reason: str | None = None

    def cancel(self) -> None:
        """Stop soon; the text so far stays in the chat."""
        super().cancel()
        self._chat.cancel()

    def take(self) -> AnswerUpdate:
        """Everything new since the last call."""
        done = self.done  # before the text: nothing comes after it
        with self._lock:
            text = "".join(self._pieces)
            self._pieces.clear()
            return AnswerUpdate(
                text,
                self._metrics,
                self.progress,
                self._finish_reason,
                self.error,
                done,
                self._calls,
            )

    def show(self, progress: Progress) -> None:
        """How far the prompt is read."""
        super().show(progress)
        self._cancel_again()

    def _stream(self, text: str | None) -> bool:
        tools = self._tools()
        if self.cancelled.is_set():
            self._finish_reason = "cancelled"
            return True
        chunks = stream_answer(self._chat, text, tools, last=self._last, on_progress=self.show)
        for chunk in chunks:
            with self._lock:
                self._pieces.append(chunk.text)
                self._metrics = chunk.metrics
                self._finish_reason = chunk.finish_reason
                self._calls = chunk.tool_calls
            if self._writer is not None:
                self._writer.write(chunk.text)
            self._cancel_again()
        return True

    def _tools(self) -> Sequence[Mapping[str, Any]]:
        """What the model is offered; waits for servers that are starting."""
        if self._toolbox is None or not self._chat.takes_tools:
            return ()
        if self._toolbox.starting:
            self.show(Progress(SERVERS, 0, None, ""))
        self._toolbox.wait(self.cancelled)
        return self._toolbox.definitions()

    def _cancel_again(self) -> None:
        # A cancel that came before the chat had begun to answer did not reach it.
        if self.cancelled.is_set():
            self._chat.cancel()
