"""``localrt help [PAGE|COMMAND]``: the pages of the documentation, in the terminal."""

from __future__ import annotations

import argparse
import os
import pydoc
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from localrt.cli.help import Examples
from localrt.cli.output import say_lines
from localrt.common.errors import OptionError
from localrt.common.formatting import table

EXAMPLES: Examples = (
    ("localrt help", "the pages"),
    ("localrt help server", "what the server answers"),
    ("localrt help run", "a command and its options"),
)
_LINK = re.compile(r"\[([^][]+)\]\(([\w-]+)\.md(?:#[\w-]+)?\)")
_COMMENT = re.compile(r"<!-- .*? -->\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    name = "a page of the documentation, or a command (default: a list of the pages)"
    parser.add_argument("page", nargs="?", metavar="PAGE", help=name)


def run(args: argparse.Namespace) -> int:
    """Print a page, by a pager on a terminal."""
    from localrt.cli import COMMANDS, main

    pages = pages_here()
    if args.page is None:
        titles = [(name, _read(path).partition("\n")[0].lstrip("# ")) for name, path in pages]
        say_lines(table(titles, ("PAGE", "ABOUT"), ""))
        return 0
    name = args.page.lower().removesuffix(".md")
    if name in COMMANDS:
        return main([name, "--help"])
    path = dict(pages).get(name)
    if path is None:
        raise OptionError(f"there is no page {args.page!r:.80}: `localrt help` lists them")
    text = _COMMENT.sub("", _LINK.sub(r"\1 (`localrt help \2`)", _read(path)))
    if not sys.stdout.isatty():
        say_lines(text, end="")
        return 0
    from rich.console import Console  # slow to import
    from rich.markdown import Markdown

    console = Console()
    with console.capture() as captured:
        console.print(Markdown(text, hyperlinks=False))
    os.environ.setdefault("LESS", "-RF")  # shows colours, and does not wait at the end of a screen
    pydoc.pager(captured.get())
    return 0


def pages_here() -> list[tuple[str, Path]]:
    """The pages by name; in a checkout, those of the folder beside this package."""
    installed = Path(__file__).parents[1] / "docs"
    found = None if installed.is_dir() else find_spec("localrt.docs")
    folders = (found and found.submodule_search_locations) or (installed,)
    return sorted((path.stem, path) for each in folders for path in Path(each).glob("*.md"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
