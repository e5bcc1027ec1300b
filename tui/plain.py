"""The chat without a screen: a prompt, the streamed text, commands by slash.

For screen readers, pipes and terminals that cannot move a cursor: printed text never changes, and
no colour or cursor sequences are sent. Ctrl+C stops an answer and keeps its text, or stops a tool
call; the end of input refuses a call. Thinking is one line that says how long it took. Lists have
numbers instead of windows.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from localrt import History, Settings, split_thinking
from localrt.common.errors import CancelledError, LocalrtError, OptionError
from localrt.common.formatting import as_line, format_seconds
from localrt.common.option_names import spelled
from localrt.common.progress import NOTE, Progress
from localrt.history.messages import CallTurn, Decision, Way, call_line
from localrt.history.presets import Defaults, PresetsFile, read_defaults
from localrt.mcp.toolbox import Toolbox
from localrt.tui.commands import PLAIN_COMMANDS, Command, read_line
from localrt.tui.conversation.attachments import (
    Attachments,
    SentMessage,
    draft_of,
    read_attachment,
    read_mentioned,
)
from localrt.tui.conversation.generation import ROUNDS_OVER, Reply
from localrt.tui.conversation.open_conversation import OpenConversation, answer_note
from localrt.tui.conversation.state import ChatState
from localrt.tui.mentions import with_mentions
from localrt.tui.text import clean, explained, human_when, in_app, one_line, short_name

if TYPE_CHECKING:
    from localrt import ChatModel, ChatSession, ConversationInfo, Turn
    from localrt.common.progress import ProgressCallback

_Item = TypeVar("_Item")
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

    def answer(
        self, conversation: OpenConversation, chat: ChatSession, turn: Turn, **how: Any
    ) -> bool:
        """Answer a user's turn: run tool calls and let the model continue after them. ``how`` is
        ``Reply``'s. Returns whether the context is full.
        """
        # A server may begin a thought again; nothing of it has been printed.
        said = turn.content if turn.role == "assistant" else ""
        said = "" if split_thinking(said).open else said
        reply = Reply(chat, conversation, self._toolbox, turn.id, **how)
        while True:
            self._tell(reply)
            full = self._answer(reply, said)
            self._tell(reply)
            if not reply.calls:
                return full
            for call in reply.calls:
                self._run(call, chat.capacity)
            reply.go_on()
            said = ""
            if reply.last:
                self._say(ROUNDS_OVER)

    def tell_tools(self) -> None:
        """Say which MCP servers cannot be used, once."""
        for line in self._toolbox.take_news():
            self._say(line)

    def _tell(self, reply: Reply) -> None:
        if note := reply.note():
            self._say(note)

    def _answer(self, reply: Reply, said: str) -> bool:
        """Print an answer behind what it ``said`` before, and save it. Returns whether the context
        is full.
        """
        printer = _Printer(self._print, said)
        printer.thought_s = reply.thought_s
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
        full = update.is_full(reply.chat.capacity)
        if update.error is not None:
            self._say(f"Error: {explained(update.error)}")
        elif note := answer_note(update.state, update.finish_reason, full=full):
            self._say(f"({note})" if full else f"({note}; /continue goes on)")
        return full

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
    """Prints an answer as it arrives, without what it ``said`` before; its thinking as one line
    that says how long it took.
    """

    def __init__(self, out: Callable[[str], None], said: str = "") -> None:
        self._said = 0  # characters to come that were printed before
        self._out: Callable[[str], None] = lambda text: None
        self._pieces: list[str] = []
        self.printed = False
        self._began = time.monotonic()
        self._thinking = False
        self._plain = False  # whether thinking is over: text is printed unchanged
        self.thought_s: float | None = None
        self.write(said)
        self._out, self._said, self.printed = out, len(said), False

    def write(self, piece: str) -> None:
        piece, self._said = piece[self._said :], max(self._said - len(piece), 0)
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


_STAGES = {"read": "Reading", "index": "Indexing", "embed": "Embedding"}
_OTHERS_SECONDS = 0.2  # seconds between checks for other windows' messages


def run_plain(
    load: Callable[[ProgressCallback], ChatModel],
    *,
    chat_path: Path | None = None,
    resume: bool = False,
    **arguments: Any,
) -> int:
    """Chat on stdin and stdout until the end of input; for arguments see ``run_chat``."""
    config = Settings.from_environment().config_dir
    toolbox = Toolbox.open(config)
    history = partial(History, patient=True)
    arguments |= {"history": history, "config": config, "toolbox": toolbox}
    try:
        chat = PlainChat(sys.stdin, sys.stdout, **arguments)
        return chat.run(load, chat_path=chat_path, resume=resume)
    finally:
        toolbox.close()


class PlainChat:
    """A chat over two text files. ``history`` opens the history; None keeps nothing. ``config`` is
    the folder of presets and defaults.
    """

    def __init__(
        self,
        source: TextIO,
        out: TextIO,
        *,
        model_name: str,
        system: str | None,
        options: dict[str, object],
        history: Callable[[], History] | None = None,
        config: Path | None = None,
        toolbox: Toolbox | None = None,
        embedder: Callable[[], Any] | None = None,
    ) -> None:
        self._source, self._out = source, out
        self._asking = source.isatty()
        defaults = Defaults() if config is None else read_defaults(config)
        self._notes = defaults.notes
        self.state = ChatState(
            history,
            model=short_name(model_name),
            system=system,
            options=options,
            defaults=defaults,
            presets=PresetsFile(config),
            toolbox=toolbox,
        )
        self._answers = PlainAnswers(source, out, self.state.toolbox, self.say)
        self._leaving = self._given_up = False
        self._attachments = Attachments(embedder)
        self._attached: list[str] = []  # labels of the next message's attachments
        self._last_list: Sequence[ConversationInfo] = ()  # shown by the last /list
        self._told: tuple[object, ...] = ()  # the last step of reading that was printed
        self._to_delete = ""  # id of what repeating the command deletes
        self._at: Turn | None = None  # chosen for the next command
        self._ways: Sequence[Way] = ()  # out of a full context, as last listed
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="replace")

    def run(
        self,
        load: Callable[[ProgressCallback], ChatModel],
        *,
        chat_path: Path | None = None,
        resume: bool = False,
    ) -> int:
        """Load the model, then answer until the input ends."""
        for note in (*self.state.notes, *self._notes):
            self.say(note)
        self.say(f"Loading {self.state.model_name}.")
        model = load(self._say_note)
        try:
            self._begin(model, chat_path, resume)
            while not self._leaving:
                self._answers.tell_tools()
                line = self._read()
                if line is None:
                    break
                self._take(line)
                self._tell_news()
            self._save_rest()
        finally:
            if self.state.session is not None:
                self.state.session.leave()
            model.close()
            if rest := self.state.close(asked=self._given_up):
                self.say(rest)
        return 0

    def _tell_news(self) -> None:
        if line := self.state.news():
            self.say(line)

    def _save_rest(self) -> None:
        """Ask where to write what is not saved."""
        while problem := self.state.unsaved():
            self.say(f"{problem}. Name a folder to write them to; an empty line gives them up:")
            folder = self._source.readline().strip()
            if not folder:
                self._given_up = True
                break
            try:
                self.say(self.state.write_unsaved(folder))
            except LocalrtError as error:
                self.say(f"Error: {one_line(error)}")

    def say(self, text: str) -> None:
        self._say_text(as_line(spelled(text, in_app)))

    def _say_text(self, text: str) -> None:
        print(clean(spelled(text, in_app)), file=self._out, flush=True)

    def _answer(self, turn: Turn, **how: Any) -> None:
        conversation, chat = self.state.conversation, self.state.loaded.chat
        if self._answers.answer(conversation, chat, turn, **how):
            self._do_full("")

    def _say_note(self, progress: Progress) -> None:
        if progress.stage == NOTE:
            self.say(progress.detail)

    def _say_step(self, step: Progress) -> None:
        """On a terminal, a line for each quarter of 200 pages or more."""
        what = "files" if step.unit == "files" else step.detail
        told = (step.stage, what, step.unit, 4 * step.done // (step.total or 1))
        if (step.total or 0) >= 200 and told != self._told and sys.stderr.isatty():
            self._told = told
            print(clean(f"{_STAGES[step.stage]} {what}: {25 * told[-1]} %"), file=sys.stderr)

    def _begin(self, model: ChatModel, chat_path: Path | None, resume: bool) -> None:
        session = self.state.take_model(model)
        if chat_path is not None:
            self.say(self.state.load(chat_path))
        elif resume and (conversations := self.state.list()):
            self.state.open(conversations[0].id)
        else:
            self.state.take_unsent()
        for line in (session.describe(), *model.info.notes):
            self.say(line)
        if self.state.conversation.turns:
            self.say(f"Continuing “{self.state.conversation.title}”; /show prints it.")
        self._say_opened()
        self.say("Type a message, /help for commands; end a line with \\ to continue it.")

    def _read(self) -> str | None:
        """Read a line; one that ends with a backslash is continued. None at the end of input."""
        lines: list[str] = []
        while True:
            if self._asking:
                self._out.write("... " if lines else "\nYou: ")
                self._out.flush()
            try:
                line = self._source.readline()
            except KeyboardInterrupt:
                self._say_text("\n(Ctrl+D or /quit leaves)")
                lines.clear()
                continue
            except UnicodeDecodeError:
                self.say("Error: that line was not UTF-8: it is ignored")
                continue
            if not line:
                return "\n".join(lines) if lines else None
            line = line.rstrip("\r\n")
            if line.endswith("\\"):
                lines.append(line[:-1])
                self.state.conversation.keep_draft("\n".join(lines))
                continue
            return "\n".join([*lines, line])

    def _take(self, text: str) -> None:
        line = read_line(with_mentions(text.strip()))
        try:
            if isinstance(line, Command):
                self._run(line)
            elif line or self._attached:
                self._send(line)
        except LocalrtError as error:
            self.say(f"Error: {one_line(error)}")

    def _send(self, text: str) -> None:
        """Send a message after its attachments."""
        self._read_others()
        conversation, draft = self.state.conversation, self._draft(text)
        turn = conversation.add("user", draft.content, after=conversation.end, info=draft.info)
        conversation.keep_draft("")
        self._answer(turn)

    def _draft(self, text: str) -> SentMessage:
        """A message with its attachments and the files that it names."""
        session = self.state.loaded
        with _stopping("the message was not sent"):
            read = read_mentioned(text, self._say_step, sees=session.sees)
            text = self._attachments.labelled(text, read)
            text = " ".join([*self._attached, text]).strip()
            text, notes = session.fitted(self._attachments, text, self._say_step)
        for line in filter(None, [*(file.note for _, file in read), *notes]):
            self.say(line)
        draft = self._attachments.expanded(text)
        draft = self._measured(draft, text)
        self._attached.clear()
        self._say_pictures(draft)
        return draft

    def _say_pictures(self, draft: SentMessage) -> None:
        for line in draft.captions:
            self.say(f"Picture: {line}")

    def _measured(self, draft: SentMessage, text: str) -> SentMessage:
        try:
            return self.state.loaded.measured(draft)
        except OptionError as error:
            for picture in draft.pictures:
                text = text.replace(self._attachments.add_picture(picture), picture.name)
            self._attached[:] = [text]
            raise OptionError(f"{error}; an empty line sends it without them") from error

    def _run(self, command: Command) -> None:
        """Run a command: its entry's ``run``, or the ``_do_`` method of its name."""
        entry = command.entry(PLAIN_COMMANDS)
        if entry is None:
            raise OptionError(f"no command /{command.name}: /help lists them, // sends a slash")
        if entry.run is None:
            getattr(self, f"_do_{entry.name}")(command.argument)
        else:
            self._say_text(entry.run(self.state, command.argument))

    def _do_help(self, argument: str) -> None:
        rows = [(entry.usage, entry.does) for entry in PLAIN_COMMANDS if entry.name != "help"]
        rows.append(("//TEXT", "send text that begins with a slash"))
        width = max(len(usage) for usage, _ in rows) + 2
        self._say_text("\n".join(f"{usage:<{width}}{does}" for usage, does in rows))

    def _do_new(self, argument: str) -> None:
        self._open(self.state.new)

    def _do_temporary(self, argument: str) -> None:
        self._open(lambda: self.state.new(temporary=True))

    def _do_rename(self, title: str) -> None:
        self.state.conversation.set(title=title)

    def _do_quit(self, argument: str) -> None:
        self._leaving = True

    def _open(self, change: Callable[[], str]) -> None:
        """Open another conversation; ``change`` returns a line about it."""
        done = change()
        self._at = None
        for line in (*self.state.loaded.notes, done):
            self.say(line)
        self._say_opened()

    def _say_opened(self) -> None:
        conversation = self.state.conversation
        if conversation.prompt_line:
            self.say(f"{conversation.prompt_line} (/system shows it)")
        if draft := conversation.take_draft():
            self._say_text(f"Not sent yet: {draft}")

    def _do_list(self, search: str) -> None:
        self._last_list = self.state.list(search)[:30]
        if not self._last_list:
            self.say("Nothing found." if search else "No conversations yet.")
        now = time.time()
        for number, info in enumerate(self._last_list, 1):
            facts = f"{human_when(info.updated, now)}, {info.turns} turns, {short_name(info.model)}"
            self.say(f"{number}. {info.title or 'Untitled'} ({facts})")

    def _numbered(self, argument: str) -> ConversationInfo:
        if not self._last_list:
            self._last_list = self.state.list()[:30]
        return _picked(argument, self._last_list, "/list")

    def _do_open(self, argument: str) -> None:
        info = self._numbered(argument)
        self.state.open(info.id)
        self._open(lambda: f"Opened “{info.title}”; /show prints it.")

    def _do_load(self, path: str) -> None:
        self._open(lambda: self.state.load(path))

    def _do_delete(self, argument: str) -> None:
        info = self._numbered(argument)
        if self._to_delete != info.id:
            self._to_delete = info.id
            self.say(f"Enter the same command again to delete “{info.title}” for good.")
            return
        self._to_delete = ""
        self.state.delete(info.id)
        self._last_list = ()
        self.say(f"Deleted.{self.state.damaged_copies}")

    def _read_others(self) -> None:
        """Print other windows' new messages; wait for their running answer."""
        conversation = self.state.conversation
        numbers = {turn.id for turn in conversation.turns}
        conversation.refresh()
        if conversation.written_elsewhere:
            self.say("Waiting for the answer in another window; Ctrl+C takes the message back.")
        with _stopping("the message was not sent"):
            while conversation.written_elsewhere:
                time.sleep(_OTHERS_SECONDS)
                conversation.refresh()
        new = [turn for turn in conversation.turns if turn.id not in numbers]
        if new:
            self.say("Written in another window:")
            self._say_turns(new)

    def _do_show(self, argument: str) -> None:
        self._say_turns(self.state.conversation.turns, numbered=True)

    def _say_turns(self, turns: Iterable[Turn], *, numbered: bool = False) -> None:
        for number, turn in enumerate(turns, 1):
            start = f"{number}. " if numbered else ""
            branch = f" ({turn.branch} of {turn.branches})" if turn.branches > 1 else ""
            if turn.role == "tool":
                result = answer_note(turn.state) or beginning(turn.content)
                self._say_text(f"{start}Call{branch}: {call_line(turn.info)}\nResult: {result}")
            elif turn.content or "tool_calls" not in turn.info:
                who = "You" if turn.role == "user" else "Model"
                self._say_text(f"{start}{who}{branch}: {split_thinking(turn.content).answer}")
            self._say_pictures(draft_of(turn))

    def _do_thinking(self, argument: str) -> None:
        turns = self.state.conversation.turns
        thoughts = [split_thinking(turn.content).thinking for turn in reversed(turns)]
        self._say_text(next(filter(None, thoughts), "There was no thinking."))

    def _do_at(self, argument: str) -> None:
        self._at = _picked(argument, self.state.conversation.turns, "/show")
        self.say("For the next /edit, /retry, /remove or /fork:")
        self._say_turns([self._at])

    def _question(self) -> Turn:
        """The message chosen by ``/at``, or answered by what it chose; else the last one."""
        question = self.state.conversation.question(self._at.id if self._at else None)
        if question is None:
            raise OptionError("there is no message yet")
        self._at = None
        return question

    def _chosen(self) -> Turn:
        """The turn chosen by ``/at``, else the last one."""
        turns, chosen = self.state.conversation.turns, self._at
        if not turns:
            raise OptionError("there is no message yet")
        self._at = None
        return chosen or turns[-1]

    def _do_retry(self, argument: str) -> None:
        question = self._question()
        if question.pictures:
            self.state.loaded.check_sees()
        self._answer(question)

    def _do_continue(self, argument: str) -> None:
        self._answer(self._chosen(), continues=True)

    def _do_edit(self, text: str) -> None:
        if not text:
            raise OptionError("/edit needs the text to put instead of the last message")
        conversation = self.state.conversation
        if self._at is not None and self._at.role != "user":
            conversation.edit_answer(self._chosen().id, text)
            self.say("The answer is changed, as a branch beside the old one.")
            return
        before = conversation.before(self._question().id) or 0
        draft = self._draft(text)
        self._answer(conversation.add("user", draft.content, after=before, info=draft.info))

    def _do_remove(self, argument: str) -> None:
        turn = self._chosen()
        if self._to_delete != str(turn.id):
            self._to_delete, self._at = str(turn.id), turn
            self._say_turns([turn])
            self.say("Enter the same command again to remove this and all after it for good.")
            return
        self._to_delete = ""
        self.state.remove(turn.id)
        self.say("Removed.")

    def _do_fork(self, argument: str) -> None:
        turn = self._chosen()
        self._open(lambda: self.state.fork(turn.id))

    def _do_full(self, argument: str) -> None:
        if not argument:
            self._ways = self.state.loaded.ways_out()
            for number, way in enumerate(self._ways, 1):
                self.say(f"/full {number}: {way.label}")
            return
        way = _picked(argument, self._ways, "/full")
        if way.name == "oldest":
            self.state.loaded.set("overflow drop_oldest")
            self.say("From now on the oldest turns are left out: /retry or /continue.")
        elif way.name == "summary" and self.state.conversation.turns:
            self._answer(self.state.conversation.begin_summary())
        elif way.name == "longer":
            name = self.state.model_name
            self.say(f"localrt chat {name} --ctx {way.ctx} --plain --continue goes on so.")
        else:
            self._do_new("")

    def _do_branch(self, argument: str) -> None:
        conversation = self.state.conversation
        turn = next((turn for turn in reversed(conversation.turns) if turn.branches > 1), None)
        if turn is None:
            raise OptionError("there are no branches: /retry or /edit begins one")
        conversation.show_sibling(turn.id, -1 if argument == "prev" else 1)
        self._say_turns(conversation.turns)

    def _do_attach(self, argument: str) -> None:
        with _stopping("nothing was attached"):
            file = read_attachment(argument, self._say_step, sees=self.state.loaded.sees)
        if file.pictures:
            self.state.loaded.check_sees()
        self._attached.append(self._attachments.add_file(file))
        self.say(
            " ".join(filter(None, (file.note, f"{file.name} is attached to the next message.")))
        )


def _picked(argument: str, listed: Sequence[_Item], command: str) -> _Item:
    """The item of this number in what a command has listed."""
    if not argument.isdigit() or not 1 <= int(argument) <= len(listed):
        raise OptionError(f"give a number from {command}")
    return listed[int(argument) - 1]


@contextmanager
def _stopping(left: str) -> Iterator[None]:
    """Ctrl+C ends this work, with a line about what was ``left`` undone."""
    try:
        yield
    except KeyboardInterrupt:
        raise CancelledError(left) from None
