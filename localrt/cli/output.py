"""What commands print goes through here: names, texts and errors of files and servers are shown as
they are, and neither control the terminal nor look like a line of localrt's own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

from localrt.common.formatting import UNSEEN, as_line, printable


def say(*lines: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print lines, by default on stdout. What would end a line within it is spelled out."""
    print(*map(as_line, lines), sep="\n", end=end, file=file, flush=True)


def say_lines(text: str, *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print a text whose line ends are localrt's own: values in it are lines or cells already."""
    print(printable(text), end=end, file=file, flush=True)


def note(text: str) -> None:
    """Print a line of localrt's own on stderr."""
    say(f"localrt: {text}", file=sys.stderr)


def say_json(value: object, *, readable: bool = False) -> None:
    """Print a value, in which paths may be, as a line of JSON; in ASCII unless ``readable``."""
    text = json.dumps(value, ensure_ascii=not readable, default=os.fspath)
    print(UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], text), flush=True)


def say_result(value: object, text: str, *, as_json: bool) -> None:
    """Print a result for programs, or the text of it (see ``say_lines``) for people."""
    if as_json:
        say_json(value)
    else:
        say_lines(text)


def say_answer(text: str) -> None:
    """Print a part of an answer: as the model wrote it, unless it goes to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
