"""How help texts read: a usage line that fits, examples, common options, the advanced ones last.

A command's file has its examples as ``EXAMPLES``: pairs of a command and what it does. Options that
few people need go into the group ``advanced(parser)``. Knows no command.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from localrt.common.option_names import meant_by

Examples = Sequence[tuple[str, str]]

_ADVANCED = "advanced"
_WIDEST = 100  # columns
_COLUMN = 30  # where what an option does begins


def advanced(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The group of options that few people need; help shows it last."""
    for group in parser._action_groups:
        if group.title == _ADVANCED:
            return group
    return parser.add_argument_group(_ADVANCED)


class HelpfulParser(argparse.ArgumentParser):
    """Shows ``examples`` first; notes in ``epilog`` keep their line ends."""

    examples: Examples = ()
    _usage = ""

    def format_usage(self) -> str:
        """One line: what must be given, and that there are options; made once, since argparse hides
        the positionals while it takes flags between them.
        """
        self._usage = self._usage or self._make_usage()
        return self._usage

    def error(self, message: str) -> NoReturn:
        """Usage, and what is wrong, as all other errors are said."""
        self.print_usage(sys.stderr)
        said = message.removeprefix("argument ").replace(": must be ", " must be ", 1)
        self.exit(2, f"localrt: {said}\n")

    def unknown(self, words: Sequence[str]) -> str:
        """What to say of arguments that are not known, with an option that may have been meant."""
        said = f"unrecognized arguments: {' '.join(words)}"
        flag = words[0].partition("=")[0]
        flags = {_python_name(each): each for each in self._option_string_actions}
        meant = meant_by(_python_name(flag), flags)
        if meant and flag.startswith("-"):
            return f"{said} (did you mean {flags[meant]}?)"
        return f"{said} (`{self.prog} --help` lists the options)"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
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
                words += [action.option_strings[-1], _value(action)]
        for group in self._mutually_exclusive_groups:
            if group.required:
                ways = (
                    f"{each.option_strings[-1]} {_value(each)}" for each in group._group_actions
                )
                words.append(f"({' | '.join(ways)})")
        words += [_value(action) for action in self._get_positional_actions()]
        return f"usage: {' '.join(filter(None, words))}\n"

    def format_help(self) -> str:
        """Usage, what it does, examples, arguments, notes."""
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
    """As wide as the terminal, up to what reads well."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns - 2, _WIDEST)
        super().__init__(prog, max_help_position=_COLUMN, width=width)


def _format_examples(examples: Examples, columns: int) -> str:
    """Two columns; where they are too wide, what an example does is in a line below it."""
    width = max(len(command) for command, _ in examples) + 2
    between = "" if width + max(len(does) for _, does in examples) + 2 <= columns else "\n      "
    lines = [
        f"  {command}{between or ' ' * (width - len(command))}{does}".rstrip()
        for command, does in examples
    ]
    return "\n".join(["examples:", *lines, ""])


def _value(action: argparse.Action) -> str:
    """``[MODEL]``, ``MODEL ...``, ``{bash,zsh,fish}``."""
    if action.metavar is not None:
        name = str(action.metavar)
    else:
        name = f"{{{','.join(map(str, action.choices or (action.dest,)))}}}"
    if isinstance(action, argparse._SubParsersAction):
        return f"{name} ..."
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(
        str(action.nargs), name if action.nargs != 0 else ""
    )
