"""The slash commands of the plain chat: lists with numbers instead of windows.

Knows the desk and how to say a line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.errors import OptionError, StorageError
from localrt.files import write_text
from localrt.tui.chips import Chips, Draft, read_attachment
from localrt.tui.commands import Command
from localrt.tui.export import as_json, as_markdown, default_path
from localrt.tui.session import Session
from localrt.tui.text import human_when, short_name
from localrt.tui.thinking import split_thinking

if TYPE_CHECKING:
    from localrt.history import ConversationInfo
    from localrt.tui.plain import PlainChat

__all__ = ["PlainCommands"]

_HELP = (
    ("/new", "new conversation"),
    ("/list [WORDS]", "conversations, with numbers"),
    ("/open NUMBER", "go on with one of the list"),
    ("/delete NUMBER", "delete one of the list; the same again means it"),
    ("/rename TITLE", "name this conversation"),
    ("/show", "read the conversation out"),
    ("/thinking", "read the last thinking out"),
    ("/retry", "answer the last message again, as a branch"),
    ("/edit TEXT", "send TEXT in the place of the last message, as a branch"),
    ("/branch [prev]", "show the next branch of the last turn that has any"),
    ("/attach PATH", "put a text file in front of the next message"),
    ("/system [TEXT]", "show or set the system prompt; none removes it"),
    ("/set [NAME VALUE]", "list or set options; none resets one"),
    ("/export [PATH]", "save as Markdown, or JSON for a .json"),
    ("/load PATH", "open an exported or saved chat (.json)"),
    ("/quit", "leave, as Ctrl+D"),
    ("//TEXT", "send text that begins with a slash"),
)


class PlainCommands:
    """``run`` a command; errors are ``LocalrtError``s."""

    def __init__(self, chat: PlainChat) -> None:
        self._chat = chat
        self.attached: list[tuple[str, str]] = []  # chips and texts for the next message
        self._chips = Chips()
        self._found: Sequence[ConversationInfo] = ()
        self._asked: str | None = None  # what a second, same command would do
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "new": lambda argument: self._put(self._chat.desk.new, "New conversation."),
            "list": self._list,
            "open": self._open,
            "delete": self._delete,
            "rename": lambda title: self._chat.desk.talk.set(title=title),
            "show": self._show,
            "thinking": self._thinking,
            "retry": self._retry,
            "edit": self._edit,
            "branch": self._branch,
            "attach": self._attach,
            "system": lambda text: self._chat.say(self._session.system(text)),
            "set": lambda text: self._chat.say(self._session.set(text)),
            "export": self._export,
            "load": self._load,
            "quit": self._quit,
        }

    def run(self, command: Command) -> None:
        """Do it."""
        does = self._commands.get(command.name)
        if does is None:
            raise OptionError(f"no command /{command.name}: /help lists them, // sends a slash")
        does(command.argument)

    def with_attached(self, draft: Draft) -> Draft:
        """The message behind what was attached to it."""
        chips = " ".join(chip for chip, _ in self.attached)
        self.attached.clear()
        return self._chips.expanded(f"{chips} {draft.text}".strip()) if chips else draft

    @property
    def _session(self) -> Session:
        session = self._chat.desk.session
        assert session is not None, "commands run when the model is loaded"
        return session

    def _help(self, argument: str) -> None:
        width = max(len(usage) for usage, _ in _HELP) + 2
        self._chat.say("\n".join(f"{usage:<{width}}{does}" for usage, does in _HELP))

    def _quit(self, argument: str) -> None:
        self._chat.leaving = True

    # -- conversations ---------------------------------------------------------------------------

    def _put(self, change: Callable[[], Session | None], said: str) -> None:
        left = change()
        if left is not None:
            left.leave()
        for note in self._session.notes:
            self._chat.say(note)
        self._chat.say(said)

    def _list(self, search: str) -> None:
        self._found = self._chat.desk.list(search)[:30]
        if not self._found:
            self._chat.say("Nothing found." if search else "No conversations yet.")
        now = time.time()
        for number, info in enumerate(self._found, 1):
            self._chat.say(
                f"{number}. {info.title or 'Untitled'} ({human_when(info.updated, now)}, "
                f"{info.turns} turns, {short_name(info.model)})"
            )

    def _of_list(self, argument: str) -> ConversationInfo:
        if not self._found:
            self._found = self._chat.desk.list()[:30]
        if not argument.isdigit() or not 1 <= int(argument) <= len(self._found):
            raise OptionError("give a number of /list")
        return self._found[int(argument) - 1]

    def _open(self, argument: str) -> None:
        info = self._of_list(argument)
        self._put(
            lambda: self._chat.desk.open(info.id), f"Opened “{info.title}”; /show reads it out."
        )

    def _delete(self, argument: str) -> None:
        info = self._of_list(argument)
        if self._asked != info.id:
            self._asked = info.id
            self._chat.say(f"Enter the same again to delete “{info.title}” for good.")
            return
        self._asked = None
        left = self._chat.desk.delete(info.id)
        if left is not None:
            left.leave()
        self._found = ()
        self._chat.say("Deleted.")

    def _show(self, argument: str) -> None:
        for turn in self._chat.desk.talk.turns:
            who = "You" if turn.role == "user" else "Model"
            branch = f" ({turn.branch} of {turn.branches})" if turn.branches > 1 else ""
            self._chat.say(f"{who}{branch}: {split_thinking(turn.content).answer}")

    def _thinking(self, argument: str) -> None:
        thoughts = [split_thinking(t.content).thinking for t in self._chat.desk.talk.turns]
        self._chat.say(next((t for t in reversed(thoughts) if t), "There was no thinking."))

    # -- branches --------------------------------------------------------------------------------

    def _question(self) -> tuple[int, int, str]:
        """The last user's turn: its number, that of the turn before it, its text."""
        turns = self._chat.desk.talk.turns
        for place in range(len(turns) - 1, -1, -1):
            if turns[place].role == "user":
                return turns[place].id, turns[place - 1].id if place else 0, turns[place].content
        raise OptionError("there is no message yet")

    def _retry(self, argument: str) -> None:
        number, _, text = self._question()
        self._chat.answer(number, text)

    def _edit(self, text: str) -> None:
        if not text:
            raise OptionError("/edit needs the text to send instead of the last message")
        _, before, _ = self._question()
        turn = self._chat.desk.talk.add("user", text, after=before)
        self._chat.answer(turn.id, text)

    def _branch(self, argument: str) -> None:
        talk = self._chat.desk.talk
        turn = next((turn for turn in reversed(talk.turns) if turn.branches > 1), None)
        if turn is None:
            raise OptionError("there are no branches: /retry or /edit begins one")
        beside = talk.siblings(turn.id)
        step = -1 if argument == "prev" else 1
        talk.show(beside[(beside.index(turn.id) + step) % len(beside)])
        self._show("")

    # -- files -----------------------------------------------------------------------------------

    def _attach(self, argument: str) -> None:
        name, text = read_attachment(argument)
        self.attached.append((self._chips.add(name, text), text))
        self._chat.say(f"{name} goes with the next message.")

    def _export(self, argument: str) -> None:
        talk = self._chat.desk.talk
        path = Path(argument).expanduser() if argument else default_path(talk.title)
        if path.exists() and self._asked != str(path):
            self._asked = str(path)
            raise StorageError(f"{path} exists: enter the same command again to replace it")
        text = as_json(talk) if path.suffix.lower() == ".json" else as_markdown(talk)
        write_text(path, text, mode=0o600)
        self._asked = None
        self._chat.say(f"Saved to {path}")

    def _load(self, argument: str) -> None:
        if not argument:
            raise OptionError("/load needs the path of a saved conversation (.json)")
        path = Path(argument).expanduser()
        self._put(lambda: self._chat.desk.load(path), f"Opened {path}")
