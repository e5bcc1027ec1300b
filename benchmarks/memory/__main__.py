"""Memory of real processes against their budgets and forecasts, over a matrix of cells.

    python -m benchmarks.memory [--only WORDS ...] [--again WORDS ...] [--json FILE]

A run that was stopped goes on where it was: only cells without results are measured, and those
that ``--again`` names. It exits 1 if something does not hold.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import make_parser
from benchmarks.common.record import load, save, setting
from benchmarks.memory.cells import CELLS, Cell
from benchmarks.memory.measuring import measure, problems
from tests.real_models import find_real_model

_MODELS = ("smollm2", "qwen0.5b", "qwen1.5b")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, cell by cell."""
    parser = make_parser(__doc__, results="memory")
    parser.add_argument("--only", nargs="*", default=[], help="cells with these words in the name")
    parser.add_argument("--again", nargs="*", default=[], help="measure these again")
    args = parser.parse_args(arguments)
    found = {name: find_real_model(name) for name in _MODELS}
    paths = {name: path for name, path in found.items() if path is not None}
    cells = load(args.json, cells={})["cells"]
    wrong = 0
    with tempfile.TemporaryDirectory() as home:
        for cell in CELLS:
            if cell.model not in paths or not _named(cell, args.only, True):
                continue
            if cell.name not in cells or _named(cell, args.again, False):
                result = measure(cell, paths, Path(home))
                cells[cell.name] = {**result, "problems": problems(result)}
                done = {each.name: cells[each.name] for each in CELLS if each.name in cells}
                save(args.json, {**setting("python -m benchmarks.memory"), "cells": done})
            wrong += bool(cells[cell.name]["problems"])
            print(_line(cell.name, cells[cell.name]), flush=True)
    return 1 if wrong else 0


def _named(cell: Cell, words: list[str], default: bool) -> bool:
    return any(word in cell.name for word in words) if words else default


def _line(name: str, result: dict[str, Any]) -> str:
    sizes = [
        "-" if result.get(key) is None else f"{result[key] / 1e6:.1f}"
        for key in ("budget", "forecast", "peak", "tree_peak")
    ]
    budget, forecast, peak, tree = sizes
    text = f"{name}: budget {budget}, forecast {forecast}, peak {peak}, with helpers {tree} MB"
    return "\n".join([text, *(f"    {problem}" for problem in result["problems"])])


if __name__ == "__main__":
    sys.exit(main())
