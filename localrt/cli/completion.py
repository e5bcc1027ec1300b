"""``localrt completion SHELL``: a script that teaches a shell localrt's commands and options.

It is generated from the argument parser, so that it is always up to date.
"""

from __future__ import annotations

import argparse
import re
from contextlib import suppress

import shtab

from localrt.cli import build_parser
from localrt.cli.help import Examples, HelpfulParser
from localrt.cli.output import say_lines
from localrt.client.programs import PROGRAMS
from localrt.common.errors import LocalrtError
from localrt.common.settings import Settings
from localrt.hub import DEMO_NAME, list_models
from localrt.hub.names import KNOWN_MODELS
from localrt.quant.formats import CODECS

EXAMPLES: Examples = (("source <(localrt completion bash)", "for this shell only"),)

SHELLS = ("bash", "zsh", "fish")

_HARMLESS = re.compile(r"[\w./:@+-]+")  # names of files that zsh and fish take for no command
_EPILOG = """\
To install:
  bash  localrt completion bash > ~/.local/share/bash-completion/completions/localrt
  zsh   localrt completion zsh > ~/.zfunc/_localrt   (with fpath+=~/.zfunc before compinit)
  fish  localrt completion fish > ~/.config/fish/completions/localrt.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(args: argparse.Namespace) -> int:
    """Print the script for ``args.shell``."""
    parser = build_parser(complete=True)
    _add_names(parser)
    say_lines(shtab.complete(parser, args.shell))
    return 0


def _add_names(parser: HelpfulParser) -> None:
    """Let arguments complete the models known or here today, the programs and the formats."""
    here: list[str] = []
    with suppress(LocalrtError):
        found = [model.name for model in list_models(Settings.from_environment())]
        here = [name for name in found if _HARMLESS.fullmatch(name)]
    models = [*dict.fromkeys((DEMO_NAME, *(known.name for known in KNOWN_MODELS), *here))]
    names = {
        "MODEL": models,
        "PROGRAM": [each.name for each in PROGRAMS],
        "F": [*CODECS, "bf16", "f16"],
    }
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.choices is None and isinstance(action.metavar, str):
                action.choices = names.get(action.metavar)
