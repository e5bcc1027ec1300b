"""``localrt alias [NAME [MODEL]]``: the user's own names for models, kept in ``config.toml``."""

from __future__ import annotations

import argparse
from pathlib import Path

from localrt.cli.help import Examples
from localrt.cli.output import say, say_json, say_lines
from localrt.common.errors import ModelNotFoundError, OptionError
from localrt.common.formatting import one_line, table
from localrt.common.settings import Settings
from localrt.hub import resolve
from localrt.hub.listing import may_be_a_name
from localrt.hub.names import find_known, read_aliases, remove_alias, shown_path, write_alias

EXAMPLES: Examples = (
    ("localrt alias", "the names that there are"),
    ("localrt alias fast llama3.2:1b", "from now on, `localrt run fast` runs it"),
    ("localrt alias fast --remove", "forget the name; the model stays"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name like fast or work:small")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a short name, hub id, folder or .gguf file"
    )
    parser.add_argument("--remove", action="store_true", help="forget NAME; the model stays")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List, set or forget; returns the exit status."""
    settings = Settings.from_environment()
    if args.remove:
        if args.name is None or args.model is not None:
            raise OptionError("--remove takes one NAME")
        remove_alias(args.name, settings)
        return _say(args, f"{args.name} is forgotten", settings)
    if args.name is None:
        return _say(args, None, settings)
    if args.model is None:
        model = read_aliases(settings).get(args.name)
        if model is None:
            raise ModelNotFoundError(
                f"{args.name} is no name of yours: set it with `localrt alias {args.name} MODEL`"
            )
        return _say(args, f"{args.name} is {model}", settings)
    if not may_be_a_name(args.model, settings) and find_known(args.model) is None:
        raise ModelNotFoundError(f"{one_line(args.model)} is no model: see localrt list")
    before = args.name if args.name in read_aliases(settings) else _leads_to(args.name, settings)
    model = write_alias(args.name, args.model, settings)
    notes = [] if _here(args.name, settings) else ["not on this machine yet"]
    if before not in (None, args.name, model):
        notes.append(f"it hides {before}, until `localrt alias {args.name} --remove`")
    note = f" ({'; '.join(notes)})" if notes else ""
    return _say(args, f"{args.name} is {model}{note}", settings)


def _leads_to(name: str, settings: Settings) -> str | None:
    """Return the model that ``name`` already means without an alias; None if none."""
    known, here = find_known(name), _here(name, settings)
    if here is not None:
        return shown_path(here)
    return None if known is None else f"{known.repo} of the hub"


def _here(name: str, settings: Settings) -> Path | None:
    try:
        return resolve(name, settings=settings, download=False).path
    except ModelNotFoundError:
        return None


def _say(args: argparse.Namespace, line: str | None, settings: Settings) -> int:
    """Print the result of a change, or all names."""
    names = read_aliases(settings)
    if args.json:
        say_json({"models": names})
    elif line is not None:
        say(line)
    elif names:
        say_lines(table(sorted(names.items()), ("NAME", "MODEL")))
    else:
        say("No names of your own yet. Set one: localrt alias NAME MODEL")
    return 0
