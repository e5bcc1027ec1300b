"""``localrt list``: the models on this machine. Answers from the folders alone, in milliseconds."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from localrt.cli.help import Examples
from localrt.formatting import format_bytes, table
from localrt.hub import DEMO_NAME, list_models
from localrt.settings import Settings

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES: Examples = (("localrt list", "names, sizes, and where they come from"),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the models; returns the exit status."""
    models = list_models(Settings.from_environment())
    if args.json:
        records = [{**asdict(model), "path": str(model.path)} for model in models]
        print(json.dumps({"models": records}, indent=2))
    elif not models:
        print(f"No models yet. Get one: localrt pull {DEMO_NAME}  (or localrt pull org/name)")
    else:
        rows = []
        for model in models:
            size, age = format_bytes(model.bytes), _age(time.time() - model.modified)
            rows.append((model.name, size, model.kind, model.quantization or "-", age))
        print(table(rows, ("NAME", "SIZE", "KIND", "QUANTIZATION", "CHANGED"), "lr"))
    return 0


def _age(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if count := int(seconds // size):
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
