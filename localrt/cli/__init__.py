"""The command line: one parser, one file per command, errors as one line.

A command's file is imported when its arguments are parsed or explained, so that no command waits
for another's imports.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from localrt import system
from localrt.cli.help import Examples, HelpfulParser
from localrt.cli.output import note, say
from localrt.common.errors import LocalrtError, OptionError, StorageError, reason_of
from localrt.common.option_names import on_command_line
from localrt.common.processes import keep_path_absolute
from localrt.common.version import __version__

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS = {
    "chat": "chat in the terminal",
    "run": "answer a prompt, or a file of prompts, on stdout",
    "embed": "print the vectors of texts",
    "serve": "serve models to other programs, over HTTP",
    "launch": "start a coding agent, an editor or a chat front end with a model of this machine",
    "ps": "list the models that servers have loaded",
    "pull": "download a model",
    "list": "list the models on this machine",
    "show": "show what a model is, where it lies and how to run it",
    "alias": "give models names of your own",
    "rm": "delete downloaded models",
    "quantize": "write a smaller copy of a model, with fewer bits per weight",
    "plan": "say how fast a model would be here and what would help, or what this PC runs well",
    "bench": "measure engines side by side on one model",
    "eval": "measure how well a model predicts a text",
    "doctor": "show this machine, what is installed and what is missing",
    "help": "show a page of the documentation",
    "completion": "print a shell script that completes localrt's commands",
}

_EXAMPLES: Examples = (
    ("localrt chat", "chat with SmolLM2, a small model"),
    ("localrt chat llama3.2:3b", "a model by its short name, downloaded once"),
    ("localrt chat model.gguf --ram 4GB", "within 4 GB of memory"),
    ('git diff | localrt run model.gguf "Write a commit message:"', "text from a pipe"),
    ("localrt serve model.gguf", "OpenAI's protocol at http://127.0.0.1:8080/v1"),
    ("localrt plan", "what this PC runs well"),
)

_USAGE = 2
# Exit statuses as shells report them for a process that a signal ended.
_INTERRUPTED = 130
_NO_COMMAND = (
    "say what to do: `localrt chat` opens a chat with a small model, `localrt plan` says "
    "what this PC runs well, `localrt --help` lists the commands"
)
_BROKEN_PIPE = 141
_FILES = {"help": "pages"}  # of commands whose files have other names


def build_parser(*, complete: bool = False) -> HelpfulParser:
    """The command line; commands declare their arguments when they are parsed, or all at once."""
    parser = HelpfulParser(
        prog="localrt",
        description="Run language models that are bigger than your GPU, on your own machine",
        epilog="'localrt COMMAND --help' explains a command.",
        allow_abbrev=False,
    )
    parser.examples = _EXAMPLES
    parser.add_argument("--version", action="version", version=f"localrt {__version__}")
    commands = parser.add_subparsers(
        title="commands",
        dest="command",
        metavar="COMMAND",
        required=True,
        parser_class=_CommandParser,
    )
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.command = name
        if complete:
            sub.declare()
    return parser


class _CommandParser(HelpfulParser):
    """Takes flags between positionals too: ``run MODEL -c PROMPT``."""

    command = ""
    _declared = False
    _mixing = False

    def declare(self) -> None:
        """Add the command's arguments, once."""
        if not self._declared:
            self._declared = True
            command = _command(self.command)
            command.add_arguments(self)
            self.examples = getattr(command, "EXAMPLES", ())
            self.format_usage()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._mixing:  # argparse's own passes over flags and positionals
            return super().parse_known_args(args, namespace)
        self.declare()
        self._mixing = True
        try:
            found, unknown = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False
        if unknown:
            self.error(self.unknown(unknown))
        return found, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the status: 0, 1 on failure, 2 on bad usage, 130 if interrupted."""
    keep_path_absolute()  # for libraries too, which start programs by their names
    with _open_streams():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    if not (sys.argv[1:] if argv is None else argv):
        note(_NO_COMMAND)
        return _USAGE
    try:
        try:
            args = build_parser().parse_args(argv)
            status: int = _command(args.command).run(args)
        finally:
            sys.stdout.flush()
    except LocalrtError as error:
        note(error.told(on_command_line))
        return _USAGE if isinstance(error, OptionError) else 1
    except MemoryError:
        note("there is not enough memory: end other programs, or raise the limit on this one")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        try:
            sys.stdout.flush()
        except OSError:
            # Keeps the interpreter from failing again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if system.is_broken_pipe(error):
            return _BROKEN_PIPE
        note(f"{place}{reason_of(error)}")
        return 1
    except Exception:  # noqa: BLE001 - a bug; indented, as its text may be a file's
        say(*(f"  {line}" for line in traceback.format_exc().splitlines()), file=sys.stderr)
        return 1
    return status


class _ClosedOutput(io.TextIOWrapper):
    """Stands for a stdout that the caller closed."""

    def write(self, text: str) -> int:
        raise StorageError("stdout is closed: nothing can be printed")


@contextmanager
def _open_streams() -> Iterator[None]:
    """Replace streams that the caller closed: otherwise a model's file would get their number."""
    with ExitStack() as opened:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                opened.callback(setattr, sys, name, None)
                stream = opened.enter_context(Path(os.devnull).open(mode + "b"))
                kind = _ClosedOutput if name == "stdout" else io.TextIOWrapper
                setattr(sys, name, kind(stream, encoding="utf-8"))
        system.use_utf8_in_pipes()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        yield


def _command(name: str) -> ModuleType:
    return import_module(f"localrt.cli.{_FILES.get(name, name)}")
