"""The slash commands of the app and of the plain chat: one table, and how a line is read.

It defines completion and help, and runs the commands that only change the open conversation: both
chats print the text that those return. ``//`` sends a message that begins with a slash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from localrt.common.files import user_path
from localrt.engine.option_help import OPTION_HELP
from localrt.tui.conversation.state import ChatState
from localrt.tui.mentions import as_mention, open_mention


@dataclass(frozen=True, slots=True)
class Entry:
    """A command's name, its argument as help shows it, and its help text, empty if not in the app.

    ``plain``: the plain chat has it too, with its own help text if this is a string. ``run`` does
    the work and returns the text to show, in a thread if it is ``slow``. Without ``run``, the chat
    does the work: an ``action`` of the app's screen, by default with the command's name, or a
    ``_do_`` method of the plain chat. ``idle``: not while the model loads or answers. ``path``: its
    argument names a file.
    """

    name: str
    argument: str
    does: str
    run: Callable[[ChatState, str], str] | None = None
    action: str = ""
    plain: bool | str = False
    idle: bool = False
    path: bool = False
    slow: bool = False

    @property
    def usage(self) -> str:
        """``/set NAME VALUE``."""
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def takes_argument(self) -> bool:
        """Whether an argument is expected once the name is completed: it is required, or a path."""
        return bool(self.argument) and (self.path or not self.argument.startswith("["))


_TABLE = (
    Entry("help", "", "commands and keys", action="app.help", plain=True),
    Entry("new", "", "new conversation; model, prompt, options and tools stay", plain=True),
    Entry("temporary", "", "new conversation that is never on the disk", plain=True),
    Entry("list", "[WORDS]", "", plain="list or search conversations, with numbers"),
    Entry("open", "NUMBER", "", plain="open a conversation of the list"),
    Entry("delete", "NUMBER", "", plain="delete one of the list; enter it twice to confirm"),
    Entry("open", "[WORDS]", "list and search conversations", action="conversations"),
    Entry("find", "[WORDS]", "find in this conversation"),
    Entry("rename", "TITLE", "name this conversation", plain=True),
    Entry("delete", "", "delete this conversation"),
    Entry(
        *("pin", "", "list this conversation before others; again: no longer"),
        lambda chat, _: chat.pin(chat.conversation.id),
        plain=True,
        slow=True,
    ),
    Entry("show", "", "", plain="print the conversation, with numbers"),
    Entry("at", "NUMBER", "", plain="choose a turn of /show for the next command"),
    Entry("thinking", "", "", plain="print the last thinking"),
    Entry("edit", "", "change the marked answer, or the last message and send it", idle=True),
    Entry(
        *("retry", "", "answer the marked or last message again"),
        plain="answer the last message again, as a branch",
        idle=True,
    ),
    Entry("edit", "TEXT", "", plain="put TEXT instead of the last message or of an answer (/at)"),
    Entry("continue", "", "go on with the last answer, if it was cut", plain=True, idle=True),
    Entry(
        *("remove", "", "remove the marked or last turn and all after it"),
        plain="remove the last turn, or one (/at) and all after it; enter it twice",
        idle=True,
    ),
    Entry(
        "fork", "", "copy all up to the marked turn to a new conversation", plain=True, idle=True
    ),
    Entry("full", "", "what to do when the context is full", idle=True),
    Entry("full", "[NUMBER]", "", plain="what to do when the context is full; NUMBER does it"),
    Entry("branch", "[prev]", "show the next branch, or the previous one", plain=True, idle=True),
    Entry("copy", "[code]", "copy the marked or last answer, or its code"),
    Entry("fold", "", "show or hide thinking, pasted text and tool results"),
    Entry("attach", "[PATH]", "attach a file or the clipboard's picture", plain=True, path=True),
    Entry("editor", "", "write the message in $VISUAL or $EDITOR"),
    Entry(
        *("system", "[TEXT]", "show or set the system prompt"),
        lambda chat, text: chat.loaded.system(text),
        idle=True,
        plain="show or set the system prompt; none removes it",
    ),
    Entry(
        *("set", "[NAME VALUE]", "list or set options; none resets one"),
        lambda chat, option: chat.loaded.set(option),
        idle=True,
        plain=True,
    ),
    Entry(
        *("preset", "[NAME]", "use a preset, or list them"),
        lambda chat, name: chat.loaded.preset(chat.presets, name),
        idle=True,
        plain=True,
    ),
    Entry(
        *("adapter", "[NAME]", "use one of the model's adapters (none: no adapter), or list them"),
        lambda chat, name: chat.loaded.adapter(name),
        idle=True,
        plain=True,
    ),
    Entry(
        *("tools", "[on|off]", "list MCP servers and tools; switch them; retry starts failed ones"),
        lambda chat, argument: chat.tools(argument),
        plain="list MCP servers and tools; switch tools; restart failed servers",
    ),
    Entry("config", "", "options, presets, theme, keys", action="app.settings"),
    Entry("models", "[WORDS]", "list, search, download and load models", action="app.models"),
    Entry("panel", "", "show or hide the live panel: memory, disk, speed"),
    Entry(
        *("export", "[PATH]", "save as Markdown, or JSON for a .json"),
        lambda chat, path: f"Saved to {chat.export(path)}",
        plain=True,
        path=True,
        slow=True,
    ),
    Entry(
        "load", "PATH", "open conversations of a file, also of other apps", plain=True, path=True
    ),
    Entry("quit", "", "leave", action="app.quit", plain="leave, as Ctrl+D"),
)
COMMANDS = tuple(entry for entry in _TABLE if entry.does)
"""The app's commands."""
PLAIN_COMMANDS = tuple(
    replace(entry, does=entry.plain if isinstance(entry.plain, str) else entry.does)
    for entry in _TABLE
    if entry.plain
)
"""The plain chat's commands."""
_ALIASES = {
    "clear": "new",
    "save": "export",
    "exit": "quit",
    "settings": "config",
    "regenerate": "retry",
}
_MOST_FILES = 200


@dataclass(frozen=True, slots=True)
class Command:
    """A line that begins with one slash. ``name`` may be unknown."""

    name: str
    argument: str

    def entry(self, table: Iterable[Entry] = COMMANDS) -> Entry | None:
        return next((entry for entry in table if entry.name == self.name), None)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A completed line, its name in the menu, and its help."""

    line: str
    label: str
    does: str = ""


def read_line(text: str) -> Command | str:
    """A command, or the message to send."""
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    name, *rest = text[1:].split(None, 1) if text[1:].strip() else [""]
    name = name.lower()
    return Command(_ALIASES.get(name, name), rest[0].strip() if rest else "")


def as_typed(message: str) -> str:
    """The inverse of ``read_line``: the line to type for this message."""
    return f"/{message}" if message.startswith("/") else message


def suggestions(text: str) -> list[Suggestion]:
    """Completions of the command being typed, or of the file name after ``@``."""
    if (name := open_mention(text)) is not None and not text.startswith("/"):
        return _mentioned(text, name)
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return []
    name, space, argument = text[1:].partition(" ")
    name = name.lower()
    if not space:
        return [
            Suggestion(f"/{e.name}" + (" " if e.argument else ""), e.usage, e.does)
            for e in COMMANDS
            if e.name.startswith(name)
        ]
    entry = Command(name, argument).entry()
    if entry is None:
        return []
    items: list[Suggestion] = []
    if name == "set" and " " not in argument:
        items = [Suggestion(f"/set {o} ", o) for o in sorted(OPTION_HELP) if o.startswith(argument)]
    elif entry.path and argument:
        items = [Suggestion(f"/{name} {path}", path) for path in _files(argument)]
    if len(items) == 1 and items[0].line.rstrip() == text.rstrip():
        items = []
    return items or [Suggestion(text, entry.usage, entry.does)]


def completion(text: str) -> str:
    """The text that would complete the line being typed: ``"ear"`` for ``"/cl"``."""
    if len(text) < 2 or (text.startswith("/set ") and text.endswith(" ")) or text.endswith(" @"):
        return ""
    items = suggestions(text)
    line = items[0].line if items else ""
    if line.rstrip() == text or not line.startswith(text):
        return ""
    return line[len(text) :]


def _mentioned(text: str, name: str) -> list[Suggestion]:
    """Files and folders whose names begin with the text, an exact folder match first; none if the
    only match is already complete.
    """
    before = text[: text.rindex("@", 0, len(text) - len(name))]
    items = [as_mention(path) + ("" if path.endswith("/") else " ") for path in _files(name)]
    if name.endswith("/") and user_path(name).is_dir():
        whole = as_mention(name)
        items.insert(0, whole + ('" ' if whole.startswith('@"') else " "))
    if [before + each.rstrip() for each in items] == [text]:
        return []
    return [Suggestion(before + each, each.rstrip()) for each in items]


def _files(start: str) -> Iterator[str]:
    """Names of files and folders that begin with the text; folders end with a slash."""
    folder, slash, name = start.rpartition("/")
    try:
        with os.scandir(user_path(folder + slash or ".")) as entries:
            names = sorted(
                entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if entry.name.startswith(name) and (name or not entry.name.startswith("."))
            )
    except OSError:
        return
    for each in names[:_MOST_FILES]:
        yield folder + slash + each
