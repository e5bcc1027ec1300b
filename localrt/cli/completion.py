"""``localrt completion SHELL``: a script that teaches a shell localrt's commands and options.

It is generated from the argument parser, so that it is always up to date.
"""

from __future__ import annotations

import argparse

import shtab

from localrt.cli import build_parser
from localrt.cli.help import Examples

EXAMPLES: Examples = (("source <(localrt completion bash)", "for this shell only"),)

SHELLS = ("bash", "zsh", "fish")

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
    print(shtab.complete(build_parser(complete=True), args.shell))
    return 0
