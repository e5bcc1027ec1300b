"""The slash commands as data: how a line is read, which commands match, what /help says.

Pure functions. What a command does is in the app; ``//`` sends a message that begins with a slash.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMMANDS", "Command", "Entry", "completion", "help_text", "matching", "read_line"]


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


def matching(text: str) -> tuple[Entry, ...]:
    """Commands that the text may become, or the one whose argument is being written."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return ()
    name, space, _ = text[1:].partition(" ")
    if space:
        return tuple(entry for entry in COMMANDS if entry.name == name)
    return tuple(entry for entry in COMMANDS if entry.name.startswith(name))


def completion(text: str) -> str:
    """What would complete a command that is being written, such as ``"ear"`` for ``"/cl"``."""
    entries = matching(text)
    if not entries or " " in text or len(text) < 2:
        return ""
    rest = entries[0].name[len(text) - 1 :]
    return rest + (" " if entries[0].argument else "") if rest else ""


def help_text() -> str:
    """Commands and keys, aligned, for a terminal of 60 columns and more."""
    rows = [*((entry.usage, entry.does) for entry in COMMANDS), *_REST]
    width = max(len(left) for left, _ in rows) + 2
    return "\n".join(f"{left:<{width}}{right}".rstrip() for left, right in rows)
