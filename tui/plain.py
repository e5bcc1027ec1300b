"""The chat without a screen: a prompt, the streamed text, commands by slash.

For screen readers, pipes and terminals that cannot move a cursor: nothing that was written changes
again, and no colour or cursor sequence is sent. Ctrl+C stops an answer and keeps its text.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from localrt.errors import LocalrtError
from localrt.tui.chips import Draft
from localrt.tui.commands import Command, read_line
from localrt.tui.desk import Desk
from localrt.tui.plain_commands import PlainCommands
from localrt.tui.showing import ending
from localrt.tui.text import clean, human_seconds, one_line, short_name
from localrt.tui.thinking import split_thinking
from localrt.tui.turns import explained

if TYPE_CHECKING:
    from localrt import ChatSession, Chunk, History, Model
    from localrt.progress import ProgressCallback

__all__ = ["PlainChat", "run_plain"]


def run_plain(
    load: Callable[[ProgressCallback], Model],
    *,
    model_name: str,
    system: str | None,
    options: dict[str, Any],
    chat_path: Path | None = None,
    resume: bool = False,
) -> int:
    """Chat on stdin and stdout until the end of input; arguments as of ``run_chat``."""
    from localrt import History

    chat = PlainChat(
        sys.stdin,
        sys.stdout,
        model_name=model_name,
        system=system,
        options=options,
        history=History,
    )
    return chat.run(load, chat_path=chat_path, resume=resume)


class PlainChat:
    """A chat over two text files. ``history`` opens the history; None keeps nothing."""

    def __init__(
        self,
        source: TextIO,
        out: TextIO,
        *,
        model_name: str,
        system: str | None,
        options: dict[str, Any],
        history: Callable[[], History] | None = None,
    ) -> None:
        self._source, self._out = source, out
        self._asking = source.isatty()
        self.desk = Desk(
            history,
            model=short_name(model_name),
            system=system,
            options=options,
            on_problem=self.say,
            on_moved=lambda moved: None,
        )
        self._commands = PlainCommands(self)
        self.leaving = False
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="replace")

    def run(
        self,
        load: Callable[[ProgressCallback], Model],
        *,
        chat_path: Path | None = None,
        resume: bool = False,
    ) -> int:
        """Load the model, then answer until the input ends."""
        for note in self.desk.notes:
            self.say(note)
        self.say(f"Loading {self.desk.model_name}.")
        model = load(lambda progress: None)
        try:
            self._begin(model, chat_path, resume)
            while not self.leaving:
                line = self._read()
                if line is None:
                    break
                self._take(line)
        finally:
            if self.desk.session is not None:
                self.desk.session.leave()
            model.close()
            self.desk.close()
        return 0

    def say(self, text: str) -> None:
        """A line of the app."""
        print(clean(text), file=self._out, flush=True)

    def answer(self, question: int, text: str) -> None:
        """Stream the answer to a user's turn."""
        session = self.desk.session
        assert session is not None
        talk, chat = self.desk.talk, session.chat
        chat.messages = talk.messages(before=question)
        writer = talk.answer(after=question)
        last: Chunk | None = None
        state, failure = "done", None
        printer = _Printer(self._out)
        try:
            with _interrupts(chat):
                for last in chat.stream(text):
                    writer.write(last.text)
                    printer.write(last.text)
        except Exception as error:  # noqa: BLE001 - whatever it is, the person is told
            state, failure = "failed", error
        printer.end()
        reason = last.finish_reason if last is not None else None
        if reason == "cancelled":
            state = "cancelled"
        info: dict[str, Any] = {"finish_reason": reason}
        if printer.thought_s is not None:
            info["thinking_s"] = printer.thought_s
        talk.finish(writer, state, info)
        if failure is not None:
            self.say(f"Error: {explained(failure)}")
        elif note := ending(state, reason):
            self.say(f"({note})")

    # -- parts -----------------------------------------------------------------------------------

    def _begin(self, model: Model, chat_path: Path | None, resume: bool) -> None:
        session = self.desk.take(model)
        if chat_path is not None:
            self.desk.load(chat_path)
        elif resume and (found := self.desk.list()):
            self.desk.open(found[0].id)
        for line in (session.describe(), *model.info.notes):
            self.say(line)
        if self.desk.talk.turns:
            self.say(f"Going on with “{self.desk.talk.title}”; /show reads it out.")
        self.say("Type a message, /help for commands; a \\ at the end of a line goes on.")

    def _read(self) -> str | None:
        """A line, with those after it while it ends with a backslash; None at the end."""
        lines: list[str] = []
        while True:
            if self._asking:
                self._out.write("... " if lines else "\nYou: ")
                self._out.flush()
            try:
                line = self._source.readline()
            except KeyboardInterrupt:
                self.say("\n(Ctrl+D or /quit leaves)")
                lines.clear()
                continue
            except UnicodeDecodeError:
                self.say("Error: that was not UTF-8 text; it is left out")
                continue
            if not line:
                return "\n".join(lines) if lines else None
            line = line.rstrip("\r\n")
            if line.endswith("\\"):
                lines.append(line[:-1])
                continue
            return "\n".join([*lines, line])

    def _take(self, text: str) -> None:
        line = read_line(text.strip())
        try:
            if isinstance(line, Command):
                self._commands.run(line)
            elif line or self._commands.attached:
                self._send(self._commands.with_attached(Draft(line)))
        except LocalrtError as error:
            self.say(f"Error: {one_line(error)}")

    def _send(self, draft: Draft) -> None:
        talk = self.desk.talk
        folds = [[fold.start, fold.end, fold.label] for fold in draft.folds]
        turn = talk.add("user", draft.text, after=talk.end, info={"folds": folds} if folds else {})
        self.answer(turn.id, draft.text)


class _Printer:
    """Prints an answer as it comes; its thinking as one line that says how long it took."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._pieces: list[str] = []
        self._printed = 0
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
            self._print(f"(thought for {human_seconds(self.thought_s)}; /thinking reads it out)\n")
        if thought.answer:
            self._plain = True
            self._print(thought.answer)

    def end(self) -> None:
        self._print("\n")

    def _print(self, text: str) -> None:
        self._out.write(clean(text))
        self._out.flush()


@contextmanager
def _interrupts(chat: ChatSession) -> Iterator[None]:
    """Ctrl+C stops the answer, which ends as a cancelled one; a second time it ends the chat."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True
        chat.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
