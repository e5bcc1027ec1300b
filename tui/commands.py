"""The slash commands as data: how a line is read, completed and explained.

Pure functions. What a command does is in the app; ``//`` sends a message that begins with a slash.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "COMMANDS",
    "OPTIONS",
    "Command",
    "Entry",
    "as_typed",
    "completion",
    "help_text",
    "hint",
    "read_line",
]


@dataclass(frozen=True, slots=True)
class Entry:
    """A command's name, its argument as help shows it, and what it does."""

    name: str
    argument: str
    does: str

    @property
    def usage(self) -> str:
        """``/set NAME VALUE``."""
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS = (
    Entry("help", "", "commands and keys"),
    Entry("clear", "", "new conversation, same settings"),
    Entry("system", "[TEXT]", "show or set the system prompt"),
    Entry("set", "[NAME VALUE]", "list or set options; none resets one"),
    Entry("save", "[PATH]", "save the conversation"),
    Entry("load", "PATH", "open a saved conversation"),
    Entry("quit", "", "leave"),
)

OPTIONS = (
    "draft",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "max_tokens",
    "min_p",
    "overflow",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "tree_budget",
    "tree_depth",
    "typical_p",
)

_REST = (
    ("//TEXT", "send text that begins with a slash"),
    ("", ""),
    ("Enter", "send; while busy it waits in line"),
    ("Ctrl+J", "new line, as Shift+Enter"),
    ("Esc", "stop; waiting messages come back"),
    ("Up, Down", "earlier and later messages"),
    ("PgUp, PgDn", "scroll; Ctrl+End follows again"),
    ("Tab", "complete a command"),
    ("Ctrl+C", "copy selection or stop; twice quits"),
    ("Ctrl+P", "palette: themes, screenshot"),
    ("Ctrl+Q", "quit"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """A line that begins with one slash. ``name`` may be unknown."""

    name: str
    argument: str

    @property
    def known(self) -> bool:
        """Whether there is such a command."""
        return any(entry.name == self.name for entry in COMMANDS)


def read_line(text: str) -> Command | str:
    """A command, or the message to send."""
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    name, *rest = text[1:].split(None, 1) if text[1:].strip() else [""]
    return Command(name.lower(), rest[0].strip() if rest else "")


def as_typed(message: str) -> str:
    """The line that ``read_line`` takes for this message."""
    return f"/{message}" if message.startswith("/") else message


def hint(text: str) -> str:
    """What may be meant by a command that is being written, in one line; empty for a message."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return ""
    name, space, argument = text[1:].partition(" ")
    if not space:
        entries = [entry for entry in COMMANDS if entry.name.startswith(name)]
        if len(entries) > 1:
            return "  ".join(entry.usage for entry in entries)
    else:
        entries = [entry for entry in COMMANDS if entry.name == name]
        if name == "set" and argument and len(names := _options(argument)) > 1:
            return "  ".join(names)
    return f"{entries[0].usage}  {entries[0].does}" if entries else ""


def completion(text: str) -> str:
    """What would complete a command or option that is being written: ``"ear"`` for ``"/cl"``."""
    name, space, argument = text[1:].partition(" ")
    if not text.startswith("/") or not name:
        return ""
    if not space:
        entries = [entry for entry in COMMANDS if entry.name.startswith(name)]
        if not entries or entries[0].name == name:
            return ""
        return entries[0].name[len(name) :] + (" " if entries[0].argument else "")
    if name == "set" and argument and (names := _options(argument)) and names[0] != argument:
        return names[0][len(argument) :] + " "
    return ""


def _options(start: str) -> list[str]:
    return [name for name in OPTIONS if name.startswith(start)]


def help_text() -> str:
    """Commands and keys, aligned, for a terminal of 60 columns and more."""
    rows = [*((entry.usage, entry.does) for entry in COMMANDS), *_REST]
    width = max(len(left) for left, _ in rows) + 2
    return "\n".join(f"{left:<{width}}{right}".rstrip() for left, right in rows)
