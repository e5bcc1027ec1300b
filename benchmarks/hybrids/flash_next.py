"""Qwen3.8-Flash-Next streamed: what rows of its table cost a token, and all the memory it takes.

    python -m benchmarks.hybrids.flash_next [--ram SIZE] [--files FOLDER]

The file has random weights of the real layers, fewer of them and of their experts, and a table of
17 GB (``benchmarks/hybrids/files.py``). It is packed once. When a run begins, the page cache has
nothing of it. It exits 1 if rows cost more than 2 % of a token, or the process takes more than its
budget.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.contest import token_ids
from benchmarks.common.record import save, setting
from benchmarks.hybrids.files import model_file
from benchmarks.hybrids.tables import flash_next_table
from localrt.bench.process import ChildProcess, child_command
from localrt.formatting import parse_size
from localrt.settings import Settings

_TOKENS, _PROMPT, _RUNS = 48, 512, 5
_MOST_SHARE = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, and judge."""
    parser = make_parser(__doc__, results="flash_next")
    parser.add_argument("--ram", type=parse_size, default=2_000_000_000, help="of the process")
    parser.add_argument("--files", type=Path, help="where the model's file is kept")
    args = parser.parse_args(arguments)
    settings = Settings.from_environment()
    path = model_file("Qwen3.8-Flash-Next", args.files or settings.cache_dir / "bench")
    row = _measure(path, args.ram, settings.data_dir)
    record = {**setting(cited_command("hybrids.flash_next", arguments)), "rows": [row]}
    save(args.json, record)
    print(flash_next_table(record))
    return 0 if row["share"] <= _MOST_SHARE and row["peak"] <= row["budget"] else 1


def _measure(path: Path, ram: int, stores: Path) -> dict[str, Any]:
    options = {"ram": ram, "ctx": 2048, "draft": "off", "threads": 2}
    with ChildProcess(child_command(module="benchmarks.hybrids.child")) as child:
        child.ask("watch_ngrams")
        child.ask("load", path=str(path), options={"m": options})
        _forget(stores)
        child.ask("answer", name="m", prompt=token_ids(16, 99), tokens=8)
        before, runs = child.ask("ngrams"), []
        for run in range(_RUNS):
            runs.append(child.ask("answer", name="m", prompt=token_ids(16, run), tokens=_TOKENS))
        after = child.ask("ngrams")
        prompt = child.ask("answer", name="m", prompt=token_ids(_PROMPT, 7), tokens=2)
        peak = child.ask("peak")
    passes = after["passes"] - before["passes"]
    spent = {key: (after[key] - before[key]) / passes for key in ("asked", "waited")}
    rate = statistics.median(run["decode_tok_s"] for run in runs)
    return {
        "name": "flash_next",
        "file": path.stat().st_size,
        "decode_tok_s": [run["decode_tok_s"] for run in runs],
        "median": rate,
        "read_bytes": statistics.median(run["ssd_read_bytes"] for run in runs) / _TOKENS,
        "prompt_tok_s": prompt["prefill_tok_s"],
        "rows_asked_s": spent["asked"],
        "rows_waited_s": spent["waited"],
        "rows_bytes": (after["bytes"] - before["bytes"]) / passes,
        "share": sum(spent.values()) * rate,
        "peak": peak,
        "budget": ram,
    }


def _forget(folder: Path) -> None:
    """Have the page cache hold none of the stores."""
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20:
            with file.open("rb") as data:
                os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
