"""What runs in threads: loading or downloading a model, an answer, and its calls of tools.

The threads only fill these objects; the app looks at them when it draws. So the model never waits
for the screen, the screen never waits for the model, and quitting waits for neither: the threads
are daemons, told to stop and given a moment. A call's turn begins before the call runs, so an app
that is killed loses no more than its result. Knows no widget.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from localrt.common.errors import CancelledError, LocalrtError
from localrt.common.progress import NOTE, Progress
from localrt.mcp.config import ToolResult
from localrt.mcp.toolbox import REFUSED, STOPPED, Toolbox
from localrt.tui.conversation.open_conversation import OpenConversation

if TYPE_CHECKING:
    from localrt import AnswerWriter, ChatModel, ChatSession, Chunk, Metrics, ToolCall, Turn
    from localrt.common.progress import ProgressCallback
Decision = Literal["once", "always", "refuse"]
NO_TOOLS = "This model cannot be given tools: it answers without those of the MCP servers"
ROUNDS_OVER = "So many calls for one message are enough: the model has to answer now"


def stream_answer(
    chat: ChatSession,
    text: str | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    last: bool = False,
    **arguments: Any,
) -> Iterator[Chunk]:
    """The answer's chunks. ``last``: the model may call no more of the ``tools``.

    Where a server turns out to refuse tools, it is asked once more without them.
    """
    if not tools:
        yield from chat.stream(text, **arguments)
        return
    began = False
    if last:
        arguments["tool_choice"] = "none"
    try:
        for chunk in chat.stream(text, tools=tools, **arguments):
            began = True
            yield chunk
    except LocalrtError:
        if began or chat.takes_tools:
            raise
        arguments.pop("tool_choice", None)
        yield from chat.stream(text, **arguments)


def lacks_tools(toolbox: Toolbox, chat: ChatSession) -> bool:
    """Whether there are MCP servers and the model cannot be given their tools."""
    return bool(toolbox.servers.configs) and not chat.takes_tools


def begin_calls(
    toolbox: Toolbox, conversation: OpenConversation, calls: Sequence[ToolCall], after: int
) -> list[CallTurn]:
    """The turns of an answer's calls, in order behind turn ``after``."""
    begun: list[CallTurn] = []
    for call in calls:
        begun.append(CallTurn(toolbox, conversation, call, after))
        after = begun[-1].turn
    return begun


class CallTurn:
    """A call to be asked about (``asks``) and run. ``result`` is there when it has ended."""

    def __init__(
        self, toolbox: Toolbox, conversation: OpenConversation, asked: ToolCall, after: int
    ) -> None:
        self._toolbox, self._conversation, self._asked = toolbox, conversation, asked
        self._running: Future[ToolResult] | None = None
        self.call = toolbox.read(asked, conversation.id)
        self._info = {
            "tool_call_id": asked.id,
            "title": self.call.title,
            "arguments": asked.arguments,
        }
        self._writer = conversation.answer(after=after, role="tool", info=self._info)
        self.result: ToolResult | None = None

    @property
    def turn(self) -> int:
        return self._writer.turn

    @property
    def kept(self) -> KeptCall:
        return KeptCall.of(self._info)

    def asks(self) -> bool:
        """Whether the user has to decide; read anew, since an earlier answer may allow it."""
        self.call = self._toolbox.read(self._asked, self._conversation.id)
        return self.call.asks

    def always(self) -> None:
        """Let its tool run without a question in this conversation."""
        if self.call.tool is not None:
            self._toolbox.allow(self.call.tool, self._conversation.id)

    def run(self, ctx: int) -> None:
        """Begin to run; ``ctx`` is how many tokens the model's context holds."""
        self._running = self._toolbox.run(self.call, ctx=ctx)

    def has_ended(self) -> bool:
        """Whether there is a result; keeps one that has come."""
        running = self._running
        if self.result is None and running is not None and running.done():
            self._end(running.result())
        return self.result is not None

    def refuse(self) -> None:
        self._end(REFUSED)

    def stop(self) -> None:
        if not self.has_ended():
            if self._running is not None:
                self._running.cancel()
            self._end(STOPPED)

    def _end(self, result: ToolResult) -> None:
        self.result = result
        self._writer.write(result.text)
        self._conversation.finish(self._writer, "done", {**self._info, "ending": result.ending})


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call as its turn keeps it. ``arguments`` is JSON on one line, or what the model wrote."""

    title: str
    arguments: str
    ending: str = ""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> KeptCall:
        """From a turn's ``info``; a conversation of another program may say less."""
        arguments = str(info.get("arguments", ""))
        try:
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        except ValueError:
            arguments = " ".join(arguments.split())
        title = str(info.get("title") or info.get("name") or "tool")
        return cls(title, arguments, str(info.get("ending", "")))

    @classmethod
    def of_turn(cls, turn: Turn) -> KeptCall:
        return cls.of(turn.info)

    @property
    def line(self) -> str:
        """``files.read_file {"path": "a"}``."""
        return f"{self.title} {self.arguments}".rstrip()


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
        self._thread.start()

    @property
    def done(self) -> bool:
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
