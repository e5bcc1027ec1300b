"""``localrt man``: the manual page, made from the argument parser.

It is written in the macros of man(7).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from localrt.cli import build_parser
from localrt.cli.help import Examples, HelpfulParser, placeholder
from localrt.common.version import __version__

EXAMPLES: Examples = (("man <(localrt man)", "read it now"),)

_EPILOG = "To install: localrt man > ~/.local/share/man/man1/localrt.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    """Print the page."""
    print("\n".join(_page(build_parser(complete=True))))
    return 0


def _page(parser: HelpfulParser) -> Iterator[str]:
    yield f'.TH LOCALRT 1 "" "localrt {__version__}" "User Commands"'
    yield f".SH NAME\nlocalrt \\- {_plain(parser.description)}"
    yield ".SH SYNOPSIS\n.B localrt\n.I COMMAND\n[OPTIONS]"
    yield from _examples(parser, ".SH EXAMPLES")
    yield ".SH COMMANDS"
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for command in commands.choices.values():
        usage = command.format_usage().removeprefix("usage: ")
        does = command.description or ""
        yield f'.SS "{_plain(usage)}"\n{_plain(does[:1].upper() + does[1:])}.'
        yield from _examples(command, ".PP")
        for action in command._actions:
            if action.help is not argparse.SUPPRESS and action.dest != "help":
                names, value = _plain(", ".join(action.option_strings)), _plain(placeholder(action))
                yield f".TP\n\\fB{names}\\fR{' ' * bool(action.option_strings)}\\fI{value}\\fR"
                yield _plain(command._get_formatter()._expand_help(action))
    yield ".SH FILES\n\\fBlocalrt doctor\\fR lists the folders that localrt writes to."


def _examples(parser: HelpfulParser, head: str) -> Iterator[str]:
    if parser.examples:
        yield head
    for command, does in parser.examples:
        yield f".TP\n\\fB{_plain(command)}\\fR\n{_plain(does)}"


def _plain(text: str | None) -> str:
    """The text as roff prints it unchanged, on one line."""
    line = " ".join((text or "").split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{line}".replace('"', "\\(dq")
