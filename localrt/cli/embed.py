"""``localrt embed MODEL [TEXT]...``: the vectors of texts, each a line of JSON."""

from __future__ import annotations

import argparse

from localrt.cli.help import Examples
from localrt.cli.loading import load_model
from localrt.cli.options import BARE_MODEL_HELP, add_load_arguments
from localrt.cli.output import say_json
from localrt.cli.run_batch import read_stdin

EXAMPLES: Examples = (
    ('localrt embed ./bge-small "a text" "another text"', "two vectors"),
    ("localrt embed ./bge-small < lines.txt", "a vector for every line"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help=BARE_MODEL_HELP)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text (default: lines of stdin)")
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a list of numbers for each text, at length 1."""
    with load_model(args) as model:
        for vector in model.embed(args.texts or read_stdin().splitlines()):
            say_json(vector.tolist())
    return 0
