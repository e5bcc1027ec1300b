"""Recurrent and per-layer-embedding models beside llama.cpp and ik_llama.cpp, on random weights.

    python -m benchmarks.hybrids [--only WORDS] [--again WORDS] [--ik PROGRAM] [--files FOLDER]

PROGRAM is ik_llama.cpp's ``llama-bench``. The files are made once, in the shapes of published
models (``benchmarks/hybrids/files.py``). Rows are saved as they are done, and a row that is there
is not measured again unless ``--again`` names it. ``python -m benchmarks.tables`` makes the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import load, pending, save_row, setting
from benchmarks.hybrids.contest import hold_contest
from benchmarks.hybrids.files import MODELS, model_file
from localrt.settings import Settings

PACKAGES = ("llama-cpp-python", "torch", "numpy")
PROMPT, TOKENS, RUNS = 512, 64, 5


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement of a model."""

    name: str
    measure: Callable[[], Any]


def all_rows(folder: Path, ik: Path | None) -> Iterator[Row]:
    """In the order they are measured."""
    for model in MODELS:
        known = ik if model in ("Qwen3.5-4B", "Gemma-4-E4B") else None

        def contest(model: str = model, ik: Path | None = known) -> Any:
            return hold_contest(model_file(model, folder), PROMPT, TOKENS, RUNS, ik)

        yield Row(f"{model} in memory", contest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, row by row."""
    parser = make_parser(__doc__, results="hybrids")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this")
    parser.add_argument("--again", action="append", default=[], help="measure these anew")
    parser.add_argument("--ik", type=Path, metavar="PROGRAM", help="ik_llama.cpp's llama-bench")
    parser.add_argument("--files", type=Path, help="where the models' files are kept")
    args = parser.parse_args(arguments)
    folder = args.files or Settings.from_environment().cache_dir / "bench"
    record = load(args.json, rows=[])
    rows = list(all_rows(folder, args.ik))
    where = setting(cited_command("hybrids", arguments), *PACKAGES)
    for row in pending(rows, record, args.only, args.again):
        print(row.name, flush=True)
        made = {"name": row.name, "results": row.measure()}
        record = save_row(args.json, record, made, [row.name for row in rows], **where)
        print(made["results"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
