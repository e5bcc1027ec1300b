"""Answers in the plain chat: printed as they come, kept, and continued behind calls of tools.

Ctrl+C stops an answer and keeps its text. Thinking is one line that says how long it took.

Calls of tools in the plain chat: printed, asked about by a line, run, printed with results.

Ctrl+C stops a call that runs; the end of the input refuses.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from localrt import split_thinking
from localrt.common.formatting import format_seconds
from localrt.mcp.toolbox import ROUNDS, Toolbox
from localrt.tui.conversation.generation import (
    NO_TOOLS,
    ROUNDS_OVER,
    CallTurn,
    Decision,
    begin_calls,
    lacks_tools,
    stream_answer,
)
from localrt.tui.conversation.open_conversation import OpenConversation, answer_note
from localrt.tui.text import clean, explained

if TYPE_CHECKING:
    from localrt import AnswerWriter, ChatSession, Chunk, ToolCall, Turn
_DECISIONS: dict[str, Decision] = {
    "y": "once",
    "yes": "once",
    "a": "always",
    "always": "always",
    "n": "refuse",
    "no": "refuse",
}
_QUESTION = "Run it? [y]es, [a]lways in this conversation, [n]o: "
_LOOK_SECONDS = 0.05
_SHOWN = 3  # lines of a result
_LONGEST = 400  # characters of them


class PlainCalls:
    """Over two text files; ``interrupts`` hands Ctrl+C to a function for as long as it is open."""

    def __init__(
        self,
        source: TextIO,
        out: TextIO,
        interrupts: Callable[[Callable[[], object]], AbstractContextManager[None]],
    ) -> None:
        self._source, self._out = source, out
        self._interrupts = interrupts

    def run(self, turn: CallTurn, ctx: int) -> None:
        """Ask where the call asks, run it, print what it gave."""
        self._print(f"Call: {turn.kept.line}\n")
        decision: Decision = self._asked() if turn.asks() else "once"
        if decision == "always":
            turn.always()
        if decision == "refuse":
            turn.refuse()
        else:
            turn.run(ctx)
            self._wait(turn)
        assert turn.result is not None, "the call has ended"
        how = "" if turn.result.ending == "done" else f" ({turn.result.ending})"
        self._print(f"Result{how}: {beginning(turn.result.text)}\n")

    def _asked(self) -> Decision:
        while True:
            self._print(_QUESTION)
            try:
                line = self._source.readline()
            except KeyboardInterrupt:
                self._print("\n")
                return "refuse"
            except UnicodeDecodeError:
                continue
            if not line:
                self._print("\n")
                return "refuse"
            if (decision := _DECISIONS.get(line.strip().lower())) is not None:
                return decision

    def _wait(self, turn: CallTurn) -> None:
        stopped = threading.Event()
        with self._interrupts(stopped.set):
            while not turn.has_ended():
                if stopped.wait(_LOOK_SECONDS):
                    turn.stop()

    def _print(self, text: str) -> None:
        self._out.write(clean(text))
        self._out.flush()


def beginning(text: str) -> str:
    """The first lines of a result, and how many more there are."""
    lines = text.splitlines() or [""]
    shown = "\n".join(lines[:_SHOWN])
    if len(shown) > _LONGEST:
        return f"{shown[:_LONGEST]} ... ({len(text):,} characters)"
    return shown + (f"\n... {len(lines) - _SHOWN} more lines" if len(lines) > _SHOWN else "")


class PlainAnswers:
    """Answers over two text files with the tools of ``toolbox``; ``say`` prints a line."""

    def __init__(
        self, source: TextIO, out: TextIO, toolbox: Toolbox, say: Callable[[str], None]
    ) -> None:
        self._out, self._say, self._toolbox = out, say, toolbox
        self._calls = PlainCalls(source, out, _interrupts)
        self._without_tools: set[str] = set()  # models of which that was told

    def answer(self, conversation: OpenConversation, chat: ChatSession, question: Turn) -> None:
        """Answer a user's turn: calls of tools are run, and the model goes on behind them."""
        self._tell_without_tools(conversation.model, chat)
        chat.messages = conversation.messages(before=question.id)
        text: str | None = question.content
        after = question.id
        for rounds in range(ROUNDS + 1):
            if rounds == ROUNDS:
                self._say(ROUNDS_OVER)
            writer = conversation.answer(after=after)
            if rounds:
                chat.messages = conversation.messages(before=writer.turn)
            calls = self._stream(conversation, chat, writer, text, last=rounds == ROUNDS)
            self._tell_without_tools(conversation.model, chat)
            if not calls:
                break
            for call in begin_calls(self._toolbox, conversation, calls, writer.turn):
                self._calls.run(call, chat.capacity)
                after = call.turn
            text = None

    def tell_tools(self) -> None:
        """Say which MCP servers cannot be used, once."""
        for line in self._toolbox.take_news():
            self._say(line)

    def _stream(
        self,
        conversation: OpenConversation,
        chat: ChatSession,
        writer: AnswerWriter,
        text: str | None,
        *,
        last: bool,
    ) -> Sequence[ToolCall]:
        """Print an answer as it comes, and keep it; the calls that it ends with."""
        cancelled = threading.Event()
        chunk: Chunk | None = None
        reason: str | None = None
        state, failure = "done", None
        printer = _Printer(self._out)

        def stop() -> None:
            cancelled.set()
            chat.cancel()

        try:
            with _interrupts(stop):
                tools = self._tools(chat, cancelled)
                if cancelled.is_set():
                    reason = "cancelled"
                else:
                    for chunk in stream_answer(chat, text, tools, last=last):
                        writer.write(chunk.text)
                        printer.write(chunk.text)
        except Exception as error:  # noqa: BLE001 - whatever it is, the person is told
            state, failure = "failed", error
        if chunk is not None:
            reason = chunk.finish_reason
        calls = chunk.tool_calls if chunk is not None and reason == "tool_calls" else ()
        if reason == "cancelled":
            state = "cancelled"
        if printer.printed or not calls:
            printer.end()
        info: dict[str, Any] = {"finish_reason": reason}
        if printer.thought_s is not None:
            info["thinking_s"] = printer.thought_s
        if calls:
            info["tool_calls"] = [call.to_dict() for call in calls]
        conversation.finish(writer, state, info)
        if failure is not None:
            self._say(f"Error: {explained(failure)}")
        elif note := answer_note(state, reason):
            self._say(f"({note})")
        return calls

    def _tools(self, chat: ChatSession, cancelled: threading.Event) -> list[dict[str, Any]]:
        """What the model is offered; waits for servers that are starting."""
        if not chat.takes_tools:
            return []
        if self._toolbox.starting:
            self._say("Starting MCP servers.")
        self._toolbox.wait(cancelled)
        self.tell_tools()
        return self._toolbox.definitions()

    def _tell_without_tools(self, model: str, chat: ChatSession) -> None:
        """There are tools that the model cannot be given: once for each model."""
        if model not in self._without_tools and lacks_tools(self._toolbox, chat):
            self._without_tools.add(model)
            self._say(NO_TOOLS)


class _Printer:
    """Prints an answer as it comes; its thinking as one line that says how long it took."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._pieces: list[str] = []
        self.printed = False
        self._began = time.monotonic()
        self._thinking = False
        self._plain = False  # the thinking is over: text goes straight through
        self.thought_s: float | None = None

    def write(self, piece: str) -> None:
        if self._plain:
            self._print(piece)
            return
        self._pieces.append(piece)
        thought = split_thinking("".join(self._pieces))
        if thought.open and thought.thinking and not self._thinking:
            self._thinking = True
            self._print("(thinking)\n")
        if thought.open:
            return
        if self._thinking and self.thought_s is None:
            self.thought_s = time.monotonic() - self._began
            self._print(f"(thought for {format_seconds(self.thought_s)}; /thinking reads it out)\n")
        if thought.answer:
            self._plain = True
            self._print(thought.answer)

    def end(self) -> None:
        self._print("\n")

    def _print(self, text: str) -> None:
        self.printed = self.printed or bool(text)
        self._out.write(clean(text))
        self._out.flush()


@contextmanager
def _interrupts(stop: Callable[[], object]) -> Iterator[None]:
    """Ctrl+C calls ``stop``, which has to end what runs; a second time it ends the chat."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped = False

    def interrupted(number: int, frame: object) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True
        stop()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
