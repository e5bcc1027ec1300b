"""Files and folders that a message names: ``@notes.txt`` attaches that file when it is sent.

A name begins at a space or a bracket, so that an e-mail address is text; what stands in backticks
is code, and stays as it is. ``@name`` that is no file and does not look like one is text too. Looks
whether a file is there; reads none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CODE = re.compile(r"```.*?(?:```|\Z)|(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_NAME = r"""[^\s"'`@(){}\[\]<>]"""
_MENTION = re.compile(rf"""(?<![^\s(\[{{])@(?:"([^"\n]+)"|({_NAME}+)(?=[\s)\]}}>]|\Z))""")
_BEGUN = re.compile(rf"""(?<![^\s(\[{{])@("[^"\n]*|{_NAME}*)\Z""")
_AFTER = ".,;:!?"  # may end a sentence behind a name
_LIKE_A_FILE = re.compile(r"[/\\]|\w\.[A-Za-z][A-Za-z0-9]{0,3}\Z")


@dataclass(frozen=True, slots=True)
class Mention:
    """Characters ``start`` to ``end`` of a message name the file ``path``."""

    start: int
    end: int
    path: str


def mentions(text: str) -> Iterator[Mention]:
    """The files that a message names, there or not, from left to right."""
    for match in _MENTION.finditer(text):
        if _in_code(text, match.start()):
            continue
        quoted, bare = match.groups()
        if quoted:
            yield Mention(match.start(), match.end(), quoted)
            continue
        path = bare if _there(bare) else bare.rstrip(_AFTER)
        if path and (_there(path) or _LIKE_A_FILE.search(path)):
            yield Mention(match.start(), match.start() + 1 + len(path), path)


def begun(text: str) -> str | None:
    """The beginning of a name that is being written at the end of a message, None if none is."""
    match = _BEGUN.search(text)
    if match is None or _in_code(text, match.start()):
        return None
    return match.group(1).lstrip('"')


def written(path: str) -> str:
    """A name as ``mentions`` reads it: in quotes where it has to be; a folder's goes on."""
    if re.fullmatch(f"{_NAME}+", path):
        return f"@{path}"
    return f'@"{path}' if path.endswith("/") else f'@"{path}"'


def _in_code(text: str, place: int) -> bool:
    return any(match.start() <= place < match.end() for match in _CODE.finditer(text))


def _there(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, or no such home
        return False
