"""``localrt list``: the models on this machine. Reads only folders, in milliseconds."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from localrt.cli.help import Examples
from localrt.cli.output import say, say_json, say_lines
from localrt.common.errors import ModelNotFoundError
from localrt.common.files import user_path
from localrt.common.formatting import format_bytes, table
from localrt.common.settings import Settings
from localrt.hub import DEMO_NAME, LocalModel, list_models
from localrt.hub.cache import forget_use
from localrt.hub.names import shown_path

EXAMPLES: Examples = (
    ("localrt list", "names, sizes, and where they are"),
    ("localrt list qwen", "those with this in their names"),
    ("localrt list --forget ~/old.gguf", "leave out a file that was run once"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("words", nargs="*", metavar="WORD", help="only names with all these words")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--forget",
        metavar="PATH",
        help="leave out a file or folder of yours, which is not deleted (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the models; returns the exit status."""
    settings = Settings.from_environment()
    if args.forget is not None:
        path = user_path(args.forget).absolute()
        names = dict.fromkeys((args.forget, str(path), shown_path(path)))
        forgotten = [forget_use(name, settings) for name in names]
        if not any(forgotten):
            raise ModelNotFoundError(f"{args.forget} is no path that was used: see localrt list")
        say(f"{args.forget} is left out of the list")
        return 0
    words = [word.lower() for word in args.words]
    models = [model for model in list_models(settings) if _has(model, words)]
    if args.json:
        say_json({"models": [asdict(model) for model in models]})
    elif models:
        rows = [_row(model) for model in models]
        say_lines(table(rows, ("NAME", "SIZE", "FORMAT", "WHERE"), "lr"))
    elif words:
        say(f"No models with {' and '.join(words)} in their names")
    else:
        say(f"No models yet. Get one: localrt pull {DEMO_NAME}  (or localrt pull llama3.2)")
    return 0


def _has(model: LocalModel, words: list[str]) -> bool:
    names = " ".join((model.name, *model.aliases)).lower()
    return all(word in names for word in words)


def _row(model: LocalModel) -> tuple[str, ...]:
    name = f"{model.name} ({', '.join(model.aliases)})" if model.aliases else model.name
    where = model.where
    if model.packed:
        where += f", packed copy of {format_bytes(model.packed_bytes)}"
    return name, format_bytes(model.bytes), model.quantization or model.kind, where
