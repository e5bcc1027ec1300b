"""Which files of a folder are read: not hidden ones, nor those that git would ignore.

A folder may be a stranger's, and git's settings in it can name programs that git runs. So git is
not asked: the patterns are read here, as gitignore(5) has them, but for classes such as
``[[:alpha:]]`` and escapes between brackets.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import translate
from pathlib import Path

from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import is_file, read_bytes, text_lines

_LEFT_OUT = ("node_modules", "__pycache__")  # besides hidden files and folders
_SECONDS = 10.0  # of the processor: a folder of 100,000 files takes a few
_MOST_BYTES, _MOST_PATTERNS, _LONGEST = 1 << 18, 5_000, 300  # of a file; in all; characters


def files_below(folder: Path) -> Iterator[Path]:
    """Yield a folder's files at any depth, without hidden ones, those that git would ignore, and
    links that lead out of it. If git would ignore all of them, that does not count.
    """
    yield from list(_walked(folder, _MOST_PATTERNS)) or _walked(folder, 0)


def _walked(folder: Path, most: int) -> Iterator[Path]:
    top = folder.resolve()
    above = next((each for each in (top, *top.parents) if os.access(each / ".git", os.F_OK)), top)
    outer = [each for each in top.parents if each.is_relative_to(above)]
    rules = [rule for each in outer for rule in _patterns(each, ".gitignore", most)]
    until = time.thread_time() + _SECONDS
    waiting = [(top, [*rules, *_patterns(above, ".git/info/exclude", most)])]
    while waiting:
        here, rules = waiting.pop()
        own = _patterns(here, ".gitignore", most)
        rules, most = [*own, *rules], most - len(own)
        entries, inner = list[os.DirEntry[str]](), []
        with suppress(OSError):  # a closed folder
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        for entry in entries:
            if time.thread_time() > until:
                raise OptionError(f"{folder} takes too long to search: attach a part of it")
            path, is_folder = here / entry.name, entry.is_dir(follow_symlinks=False)
            place = path.as_posix().replace("\n", " ").replace("/", "\n") + "\n" * is_folder
            told = (ignores for start, rule, ignores in rules if rule.fullmatch(place, start))
            if entry.name.startswith(".") or entry.name in _LEFT_OUT or next(told, False):
                continue
            if is_folder:
                inner.append((path, rules))
            if is_file(path) and path.resolve().is_relative_to(top):
                yield folder / path.relative_to(top)
        waiting += reversed(inner)


def _patterns(folder: Path, name: str, most: int) -> list[tuple[int, re.Pattern[str], bool]]:
    """At most ``most`` patterns of a file in ``folder``: where paths below it begin, what they
    match, and whether they ignore that. The first that matches decides.
    """
    data = b""
    with suppress(LocalrtError):  # there is none
        data = read_bytes(folder / name, _MOST_BYTES)
    lines = text_lines(data.decode("utf-8-sig", "surrogateescape"))
    lines = [line for line in lines if line[:1] not in ("", "#") and len(line) <= _LONGEST]
    start = len((folder / "x").as_posix()) - 1
    return [(start, _expression(line), line[0] != "!") for line in reversed(lines[:most])]


def _expression(line: str) -> re.Pattern[str]:
    """What a pattern matches, with line feeds for slashes, as ``.`` matches all others; a folder
    has one at its end. There is one way to match what ``(?>`` begins, so that none takes long.
    """
    text = re.sub(r"(?<!\\) +$", "", line.removeprefix("!"))
    inner = text.removesuffix("/")
    inner += "/*" * inner.endswith("/**")
    inner = inner.removeprefix("/") if "/" in inner else f"**/{inner}"
    inner = re.sub(r"\\([*?[])|\\(.)", lambda it: f"[{it[1]}]" if it[1] else it[2], inner)
    inner = inner.replace("[^", "[!").replace("[!", "[!\n")
    chunks = list[str]()
    for chunk in re.split(r"(?:^|(?<=/))(?:\*\*/)+", inner):
        # Not empty, and without the flag that lets ``.`` match a line feed too, and the end.
        parts = ["(?=.)" + translate(part)[len("(?s:") : -len(r")\Z")] for part in chunk.split("/")]
        chunks.append("(?:.+\n)*?" * bool(chunks) + "\n".join(parts))
    *earlier, last = chunks
    whole = "".join(f"(?>{each})" for each in earlier) + last
    return re.compile(whole + ("\n" if text.endswith("/") else "\n?"))
