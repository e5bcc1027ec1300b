"""The command line: one parser, one file per command, errors as one line.

Starting must stay cheap: a command's module imports what it needs inside ``run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from localrt.errors import LocalrtError, OptionError
from localrt.version import __version__

__all__ = ["build_parser", "main"]

COMMANDS = (
    "chat",
    "run",
    "serve",
    "pull",
    "list",
    "rm",
    "quantize",
    "draft",
    "plan",
    "bench",
    "eval",
    "doctor",
    "completion",
)

_USAGE = 2
# As shells report a process that a signal ended.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="localrt",
        description="Run language models that are bigger than your GPU, on your own machine.",
        epilog="'localrt COMMAND --help' explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"localrt {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name in COMMANDS:
        module = _command(name)
        sub = commands.add_parser(
            name, help=module.HELP, description=module.HELP, allow_abbrev=False
        )
        module.add_arguments(sub)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """Takes flags between positionals too: ``run MODEL -c PROMPT``."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._mixing:  # argparse's own passes over flags and positionals
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 on failure, 2 on bad usage, 130 when interrupted."""
    try:
        args = build_parser().parse_args(argv)
        status: int = _command(args.command).run(args)
        sys.stdout.flush()
    except OptionError as error:
        print(f"localrt: {error}", file=sys.stderr)
        return _USAGE
    except LocalrtError as error:
        print(f"localrt: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return _BROKEN_PIPE
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"localrt: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    return status


def _command(name: str) -> ModuleType:
    return import_module(f"localrt.cli.{name}")


def _silence_stdout() -> None:
    """Keep the interpreter from failing again when it flushes stdout at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
