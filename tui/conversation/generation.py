"""Work in threads: loading or downloading a model, an answer, and its tool calls.

The threads only fill these objects; the app reads them when it draws. So the model never waits for
the screen, the screen never waits for the model, and quitting waits for neither: the threads are
daemons that are told to stop and given a moment. Knows no widget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from localrt.common.errors import CancelledError, ContextOverflowError, LocalrtError
from localrt.common.progress import NOTE, Progress
from localrt.history.messages import AnswerRecord, CallTurn
from localrt.mcp import ROUNDS
from localrt.mcp.toolbox import Toolbox
from localrt.tui.conversation.open_conversation import OpenConversation
from localrt.tui.text import one_line

if TYPE_CHECKING:
    from localrt import AnswerWriter, ChatModel, ChatSession, Chunk, Message, Metrics, ToolCall
    from localrt.common.progress import ProgressCallback

NO_TOOLS = "This model does not support tools: it answers without the MCP servers"
SERVERS = "servers"  # the stage of progress in which MCP servers start
ROUNDS_OVER = "Too many tool calls for one message: the model has to answer now"


_Result = TypeVar("_Result")


class BackgroundTask(Generic[_Result]):
    """Runs ``work`` in a thread, with this task as its argument; ``progress`` is the latest.

    Once ``done``, ``result`` or ``error`` is set.
    """

    def __init__(
        self, work: Callable[[BackgroundTask[_Result]], _Result], *, name: str = "localrt-task"
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
        """Ask the work to stop at its next step."""
        self.cancelled.set()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; returns whether it ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def show(self, progress: Progress) -> None:
        if progress.stage == NOTE:
            self._notes.append(progress.detail)
        else:
            self.progress = progress

    def step(self, progress: Progress) -> None:
        """Like ``show``, but end the work once it is cancelled."""
        if self.cancelled.is_set():
            raise CancelledError("it was stopped")
        self.show(progress)

    def take_notes(self) -> list[str]:
        """Return new lines for the user, each once."""
        taken, self._notes = self._notes, []
        return taken

    def _run(self) -> None:
        try:
            self.result = self._work(self)
        except Exception as error:  # noqa: BLE001 - the app shows any error
            self.error = error


def loading(load: Callable[[ProgressCallback], ChatModel]) -> BackgroundTask[ChatModel]:
    """A task that loads a model; if it is cancelled too late, it closes the model again."""

    def work(task: BackgroundTask[ChatModel]) -> ChatModel:
        model = load(task.step)
        if task.cancelled.is_set():
            model.close()
            raise CancelledError("loading was cancelled")
        return model

    return BackgroundTask(work)


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """The text since the last update, and the answer's state; ``done`` in the last update.

    ``prefill`` is how much of the prompt has been processed.
    """

    text: str
    chunk: Chunk | None
    prefill: Progress | None
    error: Exception | None
    done: bool

    @property
    def metrics(self) -> Metrics | None:
        return None if self.chunk is None else self.chunk.metrics

    @property
    def finish_reason(self) -> str | None:
        if self.chunk is None:  # it was stopped while servers were starting
            return "cancelled" if self.done and self.error is None else None
        return self.chunk.finish_reason

    def is_full(self, ctx: int) -> bool:
        """Whether the answer ended, or could not begin, because a context of ``ctx`` is full."""
        if self.error is not None or self.finish_reason != "length" or self.metrics is None:
            return isinstance(self.error, ContextOverflowError)
        used = self.metrics.prompt_tokens + self.metrics.completion_tokens
        return 0 < ctx <= used + 1

    @property
    def calls(self) -> Sequence[ToolCall]:
        if self.chunk is None or self.finish_reason != "tool_calls":
            return ()
        return self.chunk.tool_calls

    @property
    def state(self) -> str:
        """The state's name in the history."""
        if self.error is not None:
            return "failed"
        return "cancelled" if self.finish_reason == "cancelled" else "done"


class Generation(BackgroundTask[bool]):
    """Streams one answer of ``chat`` in a thread, and saves it there with ``writer``.

    ``begin`` is the chat's method that answers. The model is offered the tools of ``toolbox``, once
    its servers have started; if ``last``, it may call no more of them.
    """

    def __init__(
        self,
        chat: ChatSession,
        begin: Callable[..., Iterator[Chunk]],
        writer: AnswerWriter,
        toolbox: Toolbox,
        *,
        last: bool = False,
    ) -> None:
        super().__init__(lambda task: self._stream(), name="localrt-answer")
        self._chat, self._writer, self._toolbox, self._last = chat, writer, toolbox, last
        self._begin, self.record = begin, AnswerRecord()
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self._chunk: Chunk | None = None

    def cancel(self) -> None:
        """Stop soon; the text so far stays in the chat."""
        super().cancel()
        self._chat.cancel()

    def take(self) -> AnswerUpdate:
        done = self.done  # read before the text, so that no text is missed
        with self._lock:
            text = "".join(self._pieces)
            self._pieces.clear()
            return AnswerUpdate(text, self._chunk, self.progress, self.error, done)

    def show(self, progress: Progress) -> None:
        super().show(progress)
        self._cancel_again()

    def _stream(self) -> bool:
        tools: Sequence[Mapping[str, object]] = ()
        if self._chat.takes_tools:
            if self._toolbox.starting:
                self.show(Progress(SERVERS, 0, None, ""))
            self._toolbox.wait(self.cancelled)
            tools = self._toolbox.definitions()
        for chunk in () if self.cancelled.is_set() else self._chunks(tools):
            with self._lock:
                self._pieces.append(chunk.text)
                self._chunk = chunk
                self.record.add(chunk)
            self._writer.write(chunk.text)
            self._cancel_again()
        return True

    def _chunks(self, tools: Sequence[Mapping[str, object]]) -> Iterator[Chunk]:
        """The chunks of the answer; if a server refuses tools, it is asked without them."""
        if tools:
            choice: dict[str, Any] = {"tool_choice": "none"} if self._last else {}
            began = False
            try:
                for chunk in self._begin(tools=tools, on_progress=self.show, **choice):
                    began = True
                    yield chunk
                return
            except LocalrtError:
                if began or self._chat.takes_tools:
                    raise
        yield from self._begin(on_progress=self.show)

    def _cancel_again(self) -> None:
        # The chat misses a cancellation that came before it began to answer.
        if self.cancelled.is_set():
            self._chat.cancel()


class Reply:
    """The reply to a user's turn in rounds: the model answers, its calls run, it answers again.

    ``work`` streams an answer, once started; ``end`` saves the answer and begins its ``calls``.
    When those have ended, ``go_on`` prepares the next answer.
    With ``continues``, the answer ``question`` goes on.
    """

    def __init__(
        self,
        chat: ChatSession,
        conversation: OpenConversation,
        toolbox: Toolbox,
        question: int,
        *,
        continues: bool = False,
    ) -> None:
        self.chat, self._conversation, self._toolbox = chat, conversation, toolbox
        self.rounds = 0  # rounds of calls before this answer
        self.thought_s: float | None = None  # of an answer that goes on behind its thoughts
        if continues:
            writer = conversation.reopen(question)
            messages = conversation.messages(continued=writer.turn)
            self.thought_s = conversation.turns[-1].info.get("thinking_s")
            self._prepare(writer, messages, chat.continue_answer)
        else:
            self._answer(question)

    def _answer(self, after: int) -> None:
        kept = self._conversation
        begin: Callable[..., Iterator[Chunk]] = self.chat.stream
        writer = kept.answer(after=after)
        if messages := kept.to_summarize(writer.turn):
            begin = partial(begin, overflow="drop_oldest")
        self._prepare(writer, messages or kept.messages(before=writer.turn), begin)

    def _prepare(
        self, writer: AnswerWriter, messages: list[Message], begin: Callable[..., Iterator[Chunk]]
    ) -> None:
        self.calls: list[CallTurn] = []
        self.writer, self.chat.messages = writer, messages
        self.work = Generation(self.chat, begin, writer, self._toolbox, last=self.last)

    @property
    def last(self) -> bool:
        """Whether the model may call no more tools in this answer."""
        return self.rounds >= ROUNDS

    def end(self, update: AnswerUpdate, thought_s: float | None) -> None:
        """End an answer with ``update``, after ``thought_s`` seconds of thinking."""
        self._keep(update, update.state, thought_s)
        kept, after = self._conversation, self.writer.turn
        for call in self._calls_of(update):
            turn = CallTurn(self._toolbox, kept.id, call, kept.answer, kept.finish, after)
            self.calls.append(turn)
            after = turn.turn

    def close(self, thought_s: float | None) -> None:
        """Called when the app ends: the text so far is the answer, and calls stop."""
        for call in self.calls:
            call.stop()
        if not self.calls:
            self._keep(self.work.take(), "cancelled", thought_s)

    def _calls_of(self, update: AnswerUpdate) -> Sequence[ToolCall]:
        return () if self.last else update.calls  # a server's model may call tools anyway

    def _keep(self, update: AnswerUpdate, state: str, thought_s: float | None) -> None:
        info = self.work.record.info(self._conversation.model)
        info["finish_reason"] = update.finish_reason
        if thought_s is not None:
            info["thinking_s"] = thought_s
        if update.error is not None:
            info["error"] = one_line(update.error)
        if calls := self._calls_of(update):
            info["tool_calls"] = [call.to_dict() for call in calls]
        self._conversation.finish(self.writer, state, info)

    def go_on(self) -> None:
        self.rounds += 1
        self._answer(self.calls[-1].turn)

    def cancel(self) -> None:
        """Stop the answer, keeping its text so far, or the running call."""
        if not self.calls:
            self.work.cancel()
        elif call := next((call for call in self.calls if not call.has_ended()), None):
            call.stop()

    def note(self) -> str:
        """A note for the user about the model and the tools, once per model."""
        model, told = self._conversation.model, self._toolbox.without_tools
        if self.chat.takes_tools or not self._toolbox.servers.configs or model in told:
            return ""
        told.add(model)
        return NO_TOOLS
