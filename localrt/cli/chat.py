"""``localrt chat [MODEL]``: the terminal app; without a terminal, one plain answer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.cli.model_options import (
    DEMO_MODEL,
    add_load_arguments,
    add_sampling_arguments,
    load_options,
    sampling_options,
)

if TYPE_CHECKING:
    from localrt.api import Model
    from localrt.engine.types import ProgressCallback

__all__ = ["HELP", "add_arguments", "run"]

HELP = "chat in the terminal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", nargs="?", default=DEMO_MODEL, metavar="MODEL", help=f"default: {DEMO_MODEL}"
    )
    parser.add_argument("-s", "--system", metavar="TEXT", help="system prompt")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this on stdout and exit")
    parser.add_argument("--load", metavar="PATH", type=Path, help="go on with a saved chat")
    parser.set_defaults(json=False, stats=False)
    add_load_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Open the app, or answer plainly when ``--prompt`` is given or there is no terminal."""
    if args.prompt is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        from localrt.cli.run import answer, read_prompt

        return answer(args, read_prompt(args.prompt), None)
    from localrt.engine.options import read_options
    from localrt.tui import run_chat

    options = sampling_options(args)
    read_options(options)

    def load(progress: ProgressCallback) -> Model:
        import localrt

        return localrt.load(args.model, progress=progress, **load_options(args))

    return run_chat(
        load,
        model_name=args.model,
        system=args.system,
        options=options,
        chat_path=args.load,
    )
