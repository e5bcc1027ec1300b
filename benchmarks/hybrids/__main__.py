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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.contest import hold_contest
from benchmarks.common.memory_limit import run_limited
from benchmarks.common.record import load, pending, save_row, setting
from benchmarks.hybrids.files import model_file
from benchmarks.hybrids.memory import edit_last_turn, fill_context, guess, resume_chat
from localrt.bench.workload import BenchOptions, Workload
from localrt.errors import LocalrtError
from localrt.settings import Settings

PACKAGES = ("llama-cpp-python", "torch", "numpy")
PROMPT, TOKENS, RUNS = 512, 64, 5
_KNOWN_TO_IK = ("Qwen3.5-4B", "Gemma-4-E4B")
_RECURRENT = ("LFM2-1.2B", "Granite-4-H-Tiny", "Qwen3.5-4B")
_LIMITS = {
    "Qwen3.5-4B": 1_000_000_000,
    "LFM2-1.2B": 500_000_000,
    "Granite-4-H-Tiny": 1_500_000_000,
    "Gemma-4-E4B": 1_200_000_000,
}
"""Bytes, about half of the file and less."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement of a model."""

    name: str
    measure: Callable[[], Any]


def all_rows(folder: Path, ik: Path | None) -> Iterator[Row]:
    """In the order they are measured."""

    def row(what: str, model: str, measure: Callable[[Path], Any]) -> Row:
        return Row(f"{model} {what}", lambda: measure(model_file(model, folder)))

    for model in _LIMITS:
        known = ik if model in _KNOWN_TO_IK else None
        yield row("in memory", model, partial(_contest, ik=known))
    for model, limit in _LIMITS.items():
        yield row("streamed", model, partial(_streamed, limit=limit))
    for model in _RECURRENT:
        yield row("guessing", model, partial(guess, runs=3 * RUNS))  # a small difference
        yield row("resumed", model, partial(resume_chat, tokens=6000, runs=RUNS))
    for model in _RECURRENT:
        yield row("edited", model, partial(edit_last_turn, tokens=8192, runs=RUNS))
    yield row("filled", "LFM2-1.2B", partial(fill_context, ram="2.6GB", tokens=131_072))


def _contest(path: Path, ik: Path | None) -> Any:
    return hold_contest(path, PROMPT, TOKENS, RUNS, ik)


def _streamed(path: Path, limit: int) -> Any:
    """Tokens a second under a limit that the file exceeds."""
    found: dict[str, Any] = {"limit": limit, "file": path.stat().st_size}
    for engine, tokens in (("native", 32), ("llamacpp", 8)):
        options = BenchOptions(
            path=path,
            engines=(engine,),
            workload=Workload(prompt_tokens=8, tokens=tokens, runs=RUNS),
            threads=2,
            settings={"llamacpp": ("plain",)},
        )
        outcome = run_limited(options, limit)
        results = outcome.results
        if not results:
            raise LocalrtError(f"{engine}: {outcome.skipped[0].reason}")
        found[engine] = {
            "decode_tok_s": [sample["decode_tok_s"] for sample in results[0].samples],
            "median": results[0].metrics["decode_tok_s"],
            "read_bytes_per_token": results[0].metrics["read_bytes_per_token"],
            "peak_cgroup_bytes": results[0].metrics["peak_cgroup_bytes"],
        }
    return found | {"times": found["native"]["median"] / found["llamacpp"]["median"]}


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
