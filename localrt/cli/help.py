"""Help texts of commands, and the status line on stderr during long work.

A command's file has its examples as ``EXAMPLES``: pairs of a command and what it does. Options that
few people need go into the group ``advanced(parser)``, which ``--help`` lists last. This module
knows no command.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from localrt.cli.output import say, say_lines
from localrt.common.closing import Closing
from localrt.common.formatting import as_line, format_bytes, format_count, format_seconds
from localrt.common.option_names import meant_by, on_command_line, spelled
from localrt.common.progress import NOTE, Progress

Examples = Sequence[tuple[str, str]]
_ADVANCED = "advanced"
_WIDEST = 100  # columns
_COLUMN = 30  # at which the help of an option begins
_FIRST_SECONDS, _PRINT_SECONDS = 2.0, 10.0  # before and between lines without a terminal
_PRINT_SHARE = 0.1  # of the work, from one of these lines to the next at least


def advanced(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Return the group for options that few people need; help shows it last."""
    for group in parser._action_groups:
        if group.title == _ADVANCED:
            return group
    return parser.add_argument_group(_ADVANCED)


class HelpfulParser(argparse.ArgumentParser):
    """Shows ``examples`` first; notes in ``epilog`` keep their line ends."""

    examples: Examples = ()
    _usage = ""

    def format_usage(self) -> str:
        """Return one line with the required arguments and ``[OPTIONS]``. Made once, since argparse
        hides the positionals while it parses flags between them.
        """
        self._usage = self._usage or self._make_usage()
        return self._usage

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, in the form of all other errors; exit."""
        self.print_usage(sys.stderr)
        said = as_line(message).removeprefix("argument ").replace(": must be ", " must be ", 1)
        self.exit(2, f"localrt: {said}\n")

    def unknown(self, words: Sequence[str]) -> str:
        """Return the error for unknown arguments, with the closest option as a suggestion."""
        said = f"unrecognized arguments: {' '.join(words)}"
        flag = words[0].partition("=")[0]
        flags = {_python_name(each): each for each in self._option_string_actions}
        meant = meant_by(_python_name(flag), flags)
        if meant and flag.startswith("-"):
            return f"{said} (did you mean {flags[meant]}?)"
        return f"{said} (`{self.prog} --help` lists the options)"

    def _print_message(self, message: str, file: Any = None) -> None:
        say_lines(message, end="", file=file or sys.stderr)  # argparse's hides full disks

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            near = difflib.get_close_matches(str(value), action.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"`{self.prog} --help` lists them"
            raise argparse.ArgumentError(None, f"no command {value!r:.80} ({hint})")
        choices = ", ".join(map(str, action.choices))
        raise argparse.ArgumentError(action, f"must be one of {choices}, is {value!r:.80}")

    def _make_usage(self) -> str:
        words = [self.prog, "[OPTIONS]"]
        for action in self._actions:
            if action.option_strings and action.required:
                words += [action.option_strings[-1], placeholder(action)]
        for group in self._mutually_exclusive_groups:
            if group.required:
                ways = (
                    f"{each.option_strings[-1]} {placeholder(each)}"
                    for each in group._group_actions
                )
                words.append(f"({' | '.join(ways)})")
        words += [placeholder(action) for action in self._get_positional_actions()]
        return f"usage: {' '.join(filter(None, words))}\n"

    def format_help(self) -> str:
        """Return the help: usage, description, examples, arguments, notes."""
        formatter = _Formatter(self.prog)
        parts = [self.format_usage()]
        if self.description:
            parts.append(f"{self.description[:1].upper()}{self.description[1:]}.\n")
        if self.examples:
            parts.append(_format_examples(self.examples, formatter._width))
        groups = sorted(self._action_groups, key=lambda group: group.title == _ADVANCED)
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return "\n".join([*parts, formatter.format_help()])


def _python_name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Formats as wide as the terminal, up to 100 columns."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns - 2, _WIDEST)
        super().__init__(prog, max_help_position=_COLUMN, width=width)


def _format_examples(examples: Examples, columns: int) -> str:
    """Format examples in two columns; if too wide, put each description on its own line."""
    width = max(len(command) for command, _ in examples) + 2
    between = "" if width + max(len(does) for _, does in examples) + 2 <= columns else "\n      "
    lines = [
        f"  {command}{between or ' ' * (width - len(command))}{does}".rstrip()
        for command, does in examples
    ]
    return "\n".join(["examples:", *lines, ""])


def placeholder(action: argparse.Action) -> str:
    """Return an argument's placeholder: ``[MODEL]``, ``MODEL ...``, ``{bash,zsh,fish}``."""
    if action.metavar is not None:
        name = str(action.metavar)
    else:
        name = f"{{{','.join(map(str, action.choices or (action.dest,)))}}}"
    if isinstance(action, argparse._SubParsersAction):
        return f"{name} ..."
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(
        str(action.nargs), name if action.nargs != 0 else ""
    )


_VERBS = {
    "download": "downloading",
    "verify": "checking",
    "measure": "measuring the GPU",
    "pack": "packing",
    "load": "loading",
    "compile": "compiling",
    "read": "reading",
    "index": "indexing",
    "embed": "embedding",
    "quantize": "quantizing",
    "write": "writing text",
    "train": "training",
}


class StatusLine(Closing):
    """A line that is rewritten on a terminal (``live``); elsewhere it shows nothing."""

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self.stream = stream or sys.stderr
        simple = os.environ.get("TERM") in ("dumb", "unknown")
        self.live = not simple and (self.stream.isatty() if live is None else live)

    def show(self, text: str) -> None:
        """Replace the line."""
        if self.live:
            self.stream.write(f"\r\x1b[K{as_line(text)}")
            self.stream.flush()

    def close(self) -> None:
        """Leave a clean line."""
        self.show("")


class ProgressLine(StatusLine):
    """Shows each ``Progress`` that it is called with.

    Without a terminal it prints a line soon after a stage begins, then every ten seconds or tenth
    of the work, whichever comes later, and at the end what was downloaded.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._stage = ""
        self._started = 0.0
        self._first = 0
        self._download_s = 0.0
        self.downloaded = 0
        self._due = 0.0  # the time of the next line without a terminal, and the share of the work
        self._due_share = 0.0

    def __call__(self, progress: Progress) -> None:
        """Show one step. The rate does not count bytes from an earlier run."""
        if progress.stage == NOTE:
            self.show("")
            line = spelled(progress.detail, on_command_line)
            say(f"localrt: {line}", file=self.stream)
            return
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._started, self._first = progress.stage, now, progress.done
            self._due, self._due_share = now + _FIRST_SECONDS, 0.0
        elapsed = now - self._started
        if progress.stage == "download":
            self.downloaded, self._download_s = progress.done, elapsed
        text = describe(progress, self._first, elapsed)
        self.show(text)
        share = progress.done / progress.total if progress.total else self._due_share
        if not self.live and now >= self._due and share >= self._due_share:
            self._due, self._due_share = now + _PRINT_SECONDS, share + _PRINT_SHARE
            say(f"localrt: {text}", file=self.stream)

    def close(self) -> None:
        """Leave a clean line; without a terminal, say what was downloaded."""
        super().close()
        if not self.live and self.downloaded:
            size, time_ = format_bytes(self.downloaded), format_seconds(self._download_s)
            say(f"downloaded {size} in {time_}", file=self.stream)


def describe(progress: Progress, first: int, elapsed_s: float) -> str:
    """``downloading model.gguf  43 %  42 MB of 98 MB  12 MB/s  5 s left``, at most 100 columns."""
    is_bytes = progress.unit == "bytes"
    size = format_bytes if is_bytes else format_count
    unit = "" if is_bytes else f" {progress.unit}"
    name = f" {progress.detail.rpartition('/')[2][-40:]}" if is_bytes else ""
    parts = [f"{_VERBS.get(progress.stage, progress.stage)}{name}"]
    total = progress.total
    if total:
        parts.append(f"{100 * progress.done // total} %")
        parts.append(f"{size(progress.done)} of {size(total)}{unit}")
    else:
        parts.append(f"{size(progress.done)}{unit}")
    rate = (progress.done - first) / elapsed_s if elapsed_s > 0.2 else 0.0
    if rate > 0:
        if rate >= 1:
            parts.append(f"{size(int(rate))}/s")
        if total:
            left = (total - progress.done) / rate
            parts.append(f"{f'{left:.0f} s' if left < 99.5 else format_seconds(left)} left")
    if progress.detail and not is_bytes:
        parts.append(progress.detail)
    return "  ".join(parts)
