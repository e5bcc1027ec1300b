"""Replies in the plain chat: printed as they arrive, saved, and continued after tool calls.

Thinking is one line that says how long it took. A call is printed, confirmed on a line, run, and
printed with its result. Ctrl+C stops an answer, keeping its text, or stops a call; the end of input
refuses a call.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from localrt import split_thinking
from localrt.common.formatting import format_seconds
from localrt.history.calls import CallTurn, Decision
from localrt.mcp.toolbox import Toolbox
from localrt.tui.conversation.generation import ROUNDS_OVER, Reply
from localrt.tui.conversation.open_conversation import OpenConversation, answer_note
from localrt.tui.text import clean, explained

if TYPE_CHECKING:
    from localrt import ChatSession, Turn

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
_LONGEST = 400  # characters of those lines


class PlainAnswers:
    """Answers over two text files, using the tools of ``toolbox``; ``say`` prints a line."""

    def __init__(
        self, source: TextIO, out: TextIO, toolbox: Toolbox, say: Callable[[str], None]
    ) -> None:
        self._source, self._out, self._say, self._toolbox = source, out, say, toolbox

    def answer(self, conversation: OpenConversation, chat: ChatSession, question: Turn) -> None:
        """Answer a user's turn: run tool calls and let the model continue after them."""
        reply = Reply(chat, conversation, self._toolbox, question.id)
        while True:
            self._tell(reply)
            self._answer(reply)
            self._tell(reply)
            if not reply.calls:
                return
            for call in reply.calls:
                self._run(call, chat.capacity)
            reply.go_on()
            if reply.last:
                self._say(ROUNDS_OVER)

    def tell_tools(self) -> None:
        """Say which MCP servers cannot be used, once."""
        for line in self._toolbox.take_news():
            self._say(line)

    def _tell(self, reply: Reply) -> None:
        if note := reply.note():
            self._say(note)

    def _answer(self, reply: Reply) -> None:
        """Print an answer as it arrives, and save it."""
        printer = _Printer(self._print)
        with _interrupts(reply.cancel):
            if reply.chat.takes_tools:
                if self._toolbox.starting:
                    self._say("Starting MCP servers.")
                self._toolbox.wait(reply.work.cancelled)
                self.tell_tools()
            reply.work.start()
            while not (update := reply.work.take()).done:
                printer.write(update.text)
                reply.work.join(_LOOK_SECONDS)
        printer.write(update.text)
        reply.end(update, printer.thought_s)
        if printer.printed or not reply.calls:
            self._print("\n")
        if update.error is not None:
            self._say(f"Error: {explained(update.error)}")
        elif note := answer_note(update.state, update.finish_reason):
            self._say(f"({note})")

    def _run(self, call: CallTurn, ctx: int) -> None:
        """Ask if the call must be confirmed, run it, and print its result."""
        self._print(f"Call: {call.line}\n")
        call.decide(self._decision() if call.asks() else "once", ctx)
        stopped = threading.Event()
        with _interrupts(stopped.set):
            while not call.has_ended():
                if stopped.wait(_LOOK_SECONDS):
                    call.stop()
        assert call.result is not None, "the call has ended"
        how = "" if call.result.ending == "done" else f" ({call.result.ending})"
        self._print(f"Result{how}: {beginning(call.result.text)}\n")

    def _decision(self) -> Decision:
        while True:
            self._print(_QUESTION)
            try:
                line = self._source.readline()
            except KeyboardInterrupt:
                line = ""
            except UnicodeDecodeError:
                continue
            if not line:
                self._print("\n")
                return "refuse"
            if (decision := _DECISIONS.get(line.strip().lower())) is not None:
                return decision

    def _print(self, text: str) -> None:
        self._out.write(clean(text))
        self._out.flush()


def beginning(text: str) -> str:
    """The first lines of a result, with the number of omitted lines."""
    lines = text.splitlines() or [""]
    shown = "\n".join(lines[:_SHOWN])
    if len(shown) > _LONGEST:
        return f"{shown[:_LONGEST]} ... ({len(text):,} characters)"
    return shown + (f"\n... {len(lines) - _SHOWN} more lines" if len(lines) > _SHOWN else "")


class _Printer:
    """Prints an answer as it arrives; its thinking as one line that says how long it took."""

    def __init__(self, out: Callable[[str], None]) -> None:
        self._out = out
        self._pieces: list[str] = []
        self.printed = False
        self._began = time.monotonic()
        self._thinking = False
        self._plain = False  # whether thinking is over: text is printed unchanged
        self.thought_s: float | None = None

    def write(self, piece: str) -> None:
        if self._plain:
            self._print(piece)
            return
        self._pieces.append(piece)
        thought = split_thinking("".join(self._pieces))
        if thought.thinking and not self._thinking:
            self._thinking = True
            self._print("(thinking)\n")
        if thought.open:
            return
        if self._thinking and self.thought_s is None:
            self.thought_s = time.monotonic() - self._began
            self._print(f"(thought for {format_seconds(self.thought_s)}; /thinking prints it)\n")
        if thought.answer:
            self._plain = True
            self._print(thought.answer)

    def _print(self, text: str) -> None:
        self.printed = self.printed or bool(text)
        self._out(text)


@contextmanager
def _interrupts(stop: Callable[[], object]) -> Iterator[None]:
    """Ctrl+C calls ``stop``, which must end the running work; a second Ctrl+C ends the chat."""
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
