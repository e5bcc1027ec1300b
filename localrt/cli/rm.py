"""``localrt rm MODEL``: delete a downloaded model, after asking."""

from __future__ import annotations

import argparse
import json
import sys

from localrt.cli.help import Examples
from localrt.formatting import format_bytes
from localrt.hub import remove_model
from localrt.settings import Settings

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: Examples = (("localrt rm org/name", "asks, then deletes"),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "models", metavar="MODEL", nargs="+", help="a name as `localrt list` prints it"
    )
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask, delete, say what was freed; returns the exit status: 2 when nobody can be asked."""
    names = list(dict.fromkeys(args.models))
    if not args.yes:
        if not sys.stdin.isatty():
            print("localrt: rm asks before it deletes: pass --yes", file=sys.stderr)
            return 2
        print(f"Delete {', '.join(names)}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing was deleted.", file=sys.stderr)
            return 1
    settings = Settings.from_environment()
    freed = {}
    for name in names:
        freed[name] = remove_model(name, settings)
        if not args.json:
            print(f"Deleted {name}: {format_bytes(freed[name])} freed")
    if args.json:
        removed = [{"name": name, "bytes": count} for name, count in freed.items()]
        print(json.dumps({"removed": removed, "freed_bytes": sum(freed.values())}, indent=2))
    return 0
