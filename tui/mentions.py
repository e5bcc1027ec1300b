"""The files named in a message: ``@notes.txt`` attaches that file when the message is sent.

A name begins after a space or a bracket, so an e-mail address is text, and text in backticks is
code. A picture is also attached by its path alone, as terminals paste it. Checks whether files
exist; reads none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from localrt import system
from localrt.common.files import user_path

_CODE = re.compile(r"```.*?(?:```|\Z)|(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_NAME = r"""[^\s"'`@(){}\[\]<>]"""
_BARE = rf"(?:\\ |{_NAME})"  # as in shells, a space may be escaped by a backslash
_MENTION = re.compile(rf"""(?<![^\s(\[{{])@(?:"([^"\n]+)"|({_BARE}+)(?=[\s)\]}}>]|\Z))""")
_OPEN = re.compile(rf"""(?<![^\s(\[{{])@("[^"\n]*|{_BARE}*)\Z""")
_AFTER = ".,;:!?"  # punctuation that may follow a name
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
        name = bare if _exists(_unescaped(bare)) else bare.rstrip(_AFTER)
        path = _unescaped(name)
        if path and (_exists(path) or _LIKE_A_FILE.search(path)):
            yield Mention(match.start(), match.start() + 1 + len(name), path)


def open_mention(text: str) -> str | None:
    """The start of a name being typed at the end of a message; None if there is none."""
    match = _OPEN.search(text)
    if match is None or _in_code(text, match.start()):
        return None
    return _unescaped(match.group(1).lstrip('"'))


def _unescaped(name: str) -> str:
    return name.replace("\\ ", " ")


def as_mention(path: str) -> str:
    """A name as ``mentions`` reads it, in quotes if necessary; a folder gets no closing quote, so
    that its name can be continued.
    """
    if re.fullmatch(f"{_NAME}+", path):
        return f"@{path}"
    return f'@"{path}' if path.endswith("/") else f'@"{path}"'


PICTURES = (
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".gif"),
    *(".avif", ".bmp", ".heic", ".heif", ".tif", ".tiff"),  # refused as pictures, not as texts
)
"""Suffixes of picture files."""

_ABSOLUTE = re.compile(
    r"""(?<!\S)(?:'[^'\n]+'|"[^"\n]+"|file://\S+|(?:/|[A-Za-z]:\\)(?:\\ |\S)+)"""
)


def dropped(text: str) -> list[str]:
    """The picture paths in a text that consists of nothing else.

    When files are dropped on a terminal, it pastes their paths in quotes, with escapes or as
    ``file://`` URLs.
    """
    if not text.strip(" \n\"'").lower().endswith(PICTURES):
        return []
    try:
        words = system.split(text)
    except ValueError:
        words = []
    paths = [url2pathname(urlsplit(w).path) if w.startswith("file://") else w for w in words]
    for pictures in (paths, [text.strip()]):
        if pictures and all(map(_is_picture, pictures)):
            return pictures
    return []


def with_mentions(text: str) -> str:
    """The text with ``@`` before complete paths of pictures."""
    if paths := dropped(text):
        return " ".join(map(as_mention, paths))

    def mention(match: re.Match[str]) -> str:
        paths = [] if _in_code(text, match.start()) else dropped(match.group())
        return " ".join(map(as_mention, paths)) or match.group()

    return _ABSOLUTE.sub(mention, text)


def _is_picture(path: str) -> bool:
    return path.lower().endswith(PICTURES) and Path(path).is_absolute() and _exists(path)


def _in_code(text: str, place: int) -> bool:
    return any(match.start() <= place < match.end() for match in _CODE.finditer(text))


def _exists(path: str) -> bool:
    try:
        return user_path(path).exists()
    except (OSError, ValueError):  # too long, say
        return False
