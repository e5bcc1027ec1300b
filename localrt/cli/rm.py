"""``localrt rm MODEL``: delete a downloaded model and its packed copies, after asking."""

from __future__ import annotations

import argparse
import sys

from localrt.cli.help import Examples
from localrt.cli.output import note, say, say_json
from localrt.common.formatting import format_bytes
from localrt.common.settings import Settings
from localrt.hub import remove_model
from localrt.hub.listing import Removal, plan_removal

EXAMPLES: Examples = (
    ("localrt rm llama3.2:3b", "says what goes, asks, then deletes"),
    ("localrt rm org/name-GGUF:Q4_K_M", "one of the files of a repository"),
    ("localrt rm --packed llama3.2:3b", "only the copy that was packed to stream it from the disk"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "models", metavar="MODEL", nargs="+", help="a name as `localrt list` prints it"
    )
    parser.add_argument(
        "--packed", action="store_true", help="only the packed copies of it; the model stays"
    )
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Say what will be deleted, ask, delete; return the exit status, 2 if nobody can be asked."""
    settings = Settings.from_environment()
    names = list(dict.fromkeys(args.models))
    removals = [plan_removal(name, settings, packed_only=args.packed) for name in names]
    if not args.yes:
        if not sys.stdin.isatty():
            note("rm asks before it deletes: pass --yes")
            return 2
        say(*map(_described, removals), file=sys.stderr)
        say("Delete? [y/N] ", end="", file=sys.stderr)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("Nothing was deleted.", file=sys.stderr)
            return 1
    freed = {}
    for name in names:
        freed[name] = remove_model(name, settings, packed_only=args.packed)
        if not args.json:
            what = f"the packed copy of {name}" if args.packed else name
            say(f"Deleted {what}: {format_bytes(freed[name])} freed")
    if args.json:
        removed = [{"name": name, "bytes": count} for name, count in freed.items()]
        say_json({"removed": removed, "freed_bytes": sum(freed.values())})
    return 0


def _described(removal: Removal) -> str:
    """``org/name:Q4_K_M  2.0 GB, and its packed copy, 2.1 GB (in the hub cache, ...)``."""
    copy = f"packed copy, {format_bytes(removal.packed_bytes)}"
    if removal.packed and not removal.models:
        return f"{removal.name}: the {copy}; the model stays"
    what = ", ".join(removal.models) or removal.name
    text = f"{what}  {format_bytes(removal.bytes)}"
    if removal.packed:
        text += f", and its {copy}"
    shared = removal.place == "hub cache"
    return f"{text} (in the hub cache, which other tools share)" if shared else text
