"""The slash commands and the options of ``/set`` as data, and the files named in a message.

It covers how a line is read, completed, and shown in help. ``//`` sends a message that begins with
a slash. ``@notes.txt`` attaches that file when the message is sent: a name begins after a space or
a bracket, so an e-mail address is text, and text in backticks is code. A picture is also attached
by its path alone, as terminals paste it. Checks whether files exist; reads none.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from localrt.common.option_names import flag_value, on_command_line

OPTIONS = {
    "temperature": "Randomness: 0 always takes the most likely token, 0.8 is varied.",
    "top_p": "Keep the most likely tokens up to this total probability; 1 keeps all.",
    "top_k": "Keep this many of the most likely tokens; 0 keeps all.",
    "min_p": "Keep tokens at least this likely, relative to the best one; 0 keeps all.",
    "typical_p": "Keep the most typical tokens up to this total probability; 1 keeps all.",
    "max_tokens": "The longest answer, in tokens.",
    "seed": "A number: the same seed and text give the same answer.",
    "stop": 'End the answer at this text, or at one of several: ["a", "b"].',
    "repetition_penalty": "Above 1: tokens that occurred already become less likely.",
    "frequency_penalty": "Above 0: a token becomes less likely each time it occurs.",
    "presence_penalty": "Above 0: tokens that occurred at all become less likely.",
    "dry_multiplier": "Above 0: earlier passages are not repeated (DRY); try 0.8.",
    "dry_base": "DRY: how fast the penalty grows with each repeated token.",
    "dry_allowed_length": "DRY: this many repeated tokens are free.",
    "dry_penalty_last_n": "DRY: look back this many tokens; -1: the whole text.",
    "dry_sequence_breakers": 'DRY: a repetition ends at these texts: ["\\n", ":"].',
    "xtc_probability": "How often XTC leaves out the most likely tokens: 0 never, 0.5 is usual.",
    "xtc_threshold": "XTC leaves out tokens at least this likely, except the least likely of them.",
    "logit_bias": 'Added to tokens\' scores, by id: {"42": -5}.',
    "overflow": "When the context is full: error, or drop_oldest, which forgets old turns.",
    "draft": "Speculation: auto, off, ngram, mtp, or a smaller model or a head.",
    "tree_budget": "Draft tokens per pass, 1 to 2048; unset: tuned while it runs.",
    "tree_depth": "How many tokens ahead to draft, 1 to 64; unset: tuned while it runs.",
    "json_schema": 'Answers are JSON of this schema: {"type": "object"}; true: any JSON.',
    "regex": "The whole answer matches this regular expression.",
    "grammar": 'Answers follow this GBNF grammar, such as root ::= "yes" | "no".',
    "thinking": "on, off, or an effort: low, medium, high; unset: the model's own default.",
    "thinking_tokens": "The longest thinking, in tokens; then the answer begins. 0 is off.",
    "adapter": 'One of the model\'s adapters, or several: {"a": 0.7, "b": 0.3}; see /adapter.',
    "ignore_eos": "true: go on where the model would end its answer.",
}


def in_app(name: str, value: object) -> str:
    """An option as the app's reader knows it: ``/set max_tokens 100``, or ``max_tokens``.

    Options that only the command line sets are spelled as there.
    """
    if name not in OPTIONS:
        return on_command_line(name, value)
    return name if value is None else f"/set {name} {flag_value(value)}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A command's name, its argument as help shows it, and what it does.

    ``idle``: not while the model loads or answers. ``path``: its argument names a file. ``action``:
    the screen's action that it runs, if it takes no argument.
    """

    name: str
    argument: str
    does: str
    action: str = ""
    idle: bool = True
    path: bool = False

    @property
    def usage(self) -> str:
        """``/set NAME VALUE``."""
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def takes_argument(self) -> bool:
        """Whether one is typed once the menu has completed the name: it is needed, or a path."""
        return bool(self.argument) and (self.path or not self.argument.startswith("["))


COMMANDS = (
    Entry("help", "", "commands and keys", "app.help", idle=False),
    Entry("new", "", "new conversation, same settings", "new", idle=False),
    Entry("open", "[WORDS]", "list and search conversations", idle=False),
    Entry("find", "[WORDS]", "find in this conversation", idle=False),
    Entry("rename", "TITLE", "name this conversation", idle=False),
    Entry("delete", "", "delete this conversation", "delete", idle=False),
    Entry("edit", "", "change the marked or last message and send it again", "edit"),
    Entry("retry", "", "answer the marked or last message again", "retry"),
    Entry("branch", "[prev]", "show the next branch, or the previous one"),
    Entry("copy", "[code]", "copy the marked or last answer, or its code", idle=False),
    Entry("fold", "", "show or hide thinking, pasted text and tool results", "fold", idle=False),
    Entry("attach", "[PATH]", "attach a file or the clipboard's picture", idle=False, path=True),
    Entry("editor", "", "write the message in $VISUAL or $EDITOR", "editor", idle=False),
    Entry("system", "[TEXT]", "show or set the system prompt"),
    Entry("set", "[NAME VALUE]", "list or set options; none resets one"),
    Entry("preset", "[NAME]", "use a preset, or list them"),
    Entry("adapter", "[NAME]", "use one of the model's adapters (none: no adapter), or list them"),
    Entry("tools", "[retry]", "list MCP servers and their tools; restart failed ones", idle=False),
    Entry("config", "", "options, presets, theme, keys", "app.settings", idle=False),
    Entry("models", "[WORDS]", "list, search, download and load models", idle=False),
    Entry("panel", "", "show or hide the live panel: memory, disk, speed", "panel", idle=False),
    Entry("export", "[PATH]", "save as Markdown, or JSON for a .json", idle=False, path=True),
    Entry("load", "PATH", "open an exported or saved chat (.json)", idle=False, path=True),
    Entry("quit", "", "leave", "app.quit", idle=False),
)
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

    @property
    def entry(self) -> Entry | None:
        return next((entry for entry in COMMANDS if entry.name == self.name), None)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A completed line, its name in a menu, and what it does."""

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
    """The line from which ``read_line`` reads this message."""
    return f"/{message}" if message.startswith("/") else message


def suggestions(text: str) -> list[Suggestion]:
    """Completions of the command, or of the file's name after ``@``, that is being typed."""
    if (name := begun(text)) is not None and not text.startswith("/"):
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
    entry = Command(name, argument).entry
    if entry is None:
        return []
    found: list[Suggestion] = []
    if name == "set" and " " not in argument:
        found = [Suggestion(f"/set {o} ", o) for o in sorted(OPTIONS) if o.startswith(argument)]
    elif entry.path and argument:
        found = [Suggestion(f"/{name} {path}", path) for path in _files(argument)]
    if len(found) == 1 and found[0].line.rstrip() == text.rstrip():
        found = []
    return found or [Suggestion(text, entry.usage, entry.does)]


def completion(text: str) -> str:
    """The text that would complete the line being typed: ``"ear"`` for ``"/cl"``."""
    if len(text) < 2 or (text.startswith("/set ") and text.endswith(" ")) or text.endswith(" @"):
        return ""
    found = suggestions(text)
    line = found[0].line if found else ""
    if line.rstrip() == text or not line.startswith(text):
        return ""
    return line[len(text) :]


def _mentioned(text: str, name: str) -> list[Suggestion]:
    """Files and folders that begin with the text, an exactly named folder first; none if the only
    match is already complete.
    """
    before = text[: text.rindex("@", 0, len(text) - len(name))]
    found = [written(path) + ("" if path.endswith("/") else " ") for path in _files(name)]
    if name.endswith("/") and Path(name).expanduser().is_dir():
        whole = written(name)
        found.insert(0, whole + ('" ' if whole.startswith('@"') else " "))
    if [before + each.rstrip() for each in found] == [text]:
        return []
    return [Suggestion(before + each, each.rstrip()) for each in found]


def _files(start: str) -> Iterator[str]:
    """Names of files and folders that begin with the text; folders end with a slash."""
    folder, slash, name = start.rpartition("/")
    try:
        with os.scandir(Path(folder + slash or ".").expanduser()) as entries:
            names = sorted(
                entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if entry.name.startswith(name) and (name or not entry.name.startswith("."))
            )
    except OSError:
        return
    for found in names[:_MOST_FILES]:
        yield folder + slash + found


_CODE = re.compile(r"```.*?(?:```|\Z)|(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_NAME = r"""[^\s"'`@(){}\[\]<>]"""
_BARE = rf"(?:\\ |{_NAME})"  # as in shells, a space may have a backslash before it
_MENTION = re.compile(rf"""(?<![^\s(\[{{])@(?:"([^"\n]+)"|({_BARE}+)(?=[\s)\]}}>]|\Z))""")
_BEGUN = re.compile(rf"""(?<![^\s(\[{{])@("[^"\n]*|{_BARE}*)\Z""")
_AFTER = ".,;:!?"  # may end a sentence after a name
_LIKE_A_FILE = re.compile(r"[/\\]|\w\.[A-Za-z][A-Za-z0-9]{0,3}\Z")


@dataclass(frozen=True, slots=True)
class Mention:
    """Characters ``start`` to ``end`` of a message name the file ``path``."""

    start: int
    end: int
    path: str


def mentions(text: str) -> Iterator[Mention]:
    """The files that a message names, existing or not, from left to right."""
    for match in _MENTION.finditer(text):
        if _in_code(text, match.start()):
            continue
        quoted, bare = match.groups()
        if quoted:
            yield Mention(match.start(), match.end(), quoted)
            continue
        name = bare if _there(_unescaped(bare)) else bare.rstrip(_AFTER)
        path = _unescaped(name)
        if path and (_there(path) or _LIKE_A_FILE.search(path)):
            yield Mention(match.start(), match.start() + 1 + len(name), path)


def begun(text: str) -> str | None:
    """The start of a name being typed at the end of a message; None if there is none."""
    match = _BEGUN.search(text)
    if match is None or _in_code(text, match.start()):
        return None
    return _unescaped(match.group(1).lstrip('"'))


def _unescaped(name: str) -> str:
    return name.replace("\\ ", " ")


def written(path: str) -> str:
    """A name as ``mentions`` reads it, in quotes if necessary; a folder's name stays open."""
    if re.fullmatch(f"{_NAME}+", path):
        return f"@{path}"
    return f'@"{path}' if path.endswith("/") else f'@"{path}"'


PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
"""How names of pictures end."""

_ABSOLUTE = re.compile(
    r"""(?<!\S)(?:'[^'\n]+'|"[^"\n]+"|file://\S+|(?:/|[A-Za-z]:\\)(?:\\ |\S)+)"""
)


def dropped(text: str) -> list[str]:
    """The paths of pictures if the text is nothing else.

    Terminals paste what is dropped on them, in quotes, with escapes or as ``file://`` URLs.
    """
    if not text.strip(" \n\"'").lower().endswith(PICTURES):
        return []
    posix = os.name == "posix"
    try:
        words = [word if posix else word.strip("\"'") for word in shlex.split(text, posix=posix)]
    except ValueError:
        words = []
    paths = [url2pathname(urlsplit(w).path) if w.startswith("file://") else w for w in words]
    for found in (paths, [text.strip()]):
        if found and all(map(_is_picture, found)):
            return found
    return []


def with_mentions(text: str) -> str:
    """The text with ``@`` before whole paths of pictures."""
    if paths := dropped(text):
        return " ".join(map(written, paths))

    def mention(match: re.Match[str]) -> str:
        paths = [] if _in_code(text, match.start()) else dropped(match.group())
        return " ".join(map(written, paths)) or match.group()

    return _ABSOLUTE.sub(mention, text)


def _is_picture(path: str) -> bool:
    return path.lower().endswith(PICTURES) and Path(path).is_absolute() and _there(path)


def _in_code(text: str, place: int) -> bool:
    return any(match.start() <= place < match.end() for match in _CODE.finditer(text))


def _there(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, or no such home
        return False
