"""Memory of real processes against their budgets and forecasts, over a matrix of cells.

    python -m benchmarks.memory [--only WORD ...] [--again WORD ...] [--json FILE]

A run that was stopped goes on where it was: only cells without results are measured, and those
that ``--again`` names. It exits 1 if something does not hold.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.command import find_real_model, make_parser
from benchmarks.common.record import Record, Results
from benchmarks.memory.cells import CELLS
from benchmarks.memory.measuring import measure, problems

_MODELS = ("smollm2", "qwen0.5b", "qwen1.5b")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, cell by cell."""
    args = make_parser(__doc__, results="memory", rows=True).parse_args(arguments)
    found = {name: find_real_model(name) for name in _MODELS}
    paths = {name: path for name, path in found.items() if path is not None}
    results = Results(args.json, "python -m benchmarks.memory")
    here = [name for name, cell in CELLS.items() if cell.model in paths]
    with tempfile.TemporaryDirectory() as home:
        for name in results.pending(here, args.only, args.again):
            result = measure(CELLS[name], paths, Path(home))
            results.put({"name": name, **result, "problems": problems(result)}, CELLS)
    print("\n".join(map(_line, results.rows)))
    return int(any(row["problems"] for row in results.rows))


def _line(row: Record) -> str:
    keys = ("budget", "forecast", "peak", "tree_peak")
    sizes = [f"{key} {row[key] / 1e6:.1f} MB" for key in keys if row.get(key) is not None]
    return "\n    ".join([f"{row['name']}: {', '.join(sizes)}", *row["problems"]])


if __name__ == "__main__":
    sys.exit(main())
