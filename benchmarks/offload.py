"""Models larger than memory, measured: every number of the offloading pipeline by one command.

    python -m benchmarks.offload [MODEL] [--only WORD ...] [--again WORD ...]

Each engine runs in a memory control group (root, or a delegated one), the page cache dropped
before it. Rows are saved as they are done, and a row that is there is not measured again unless
``--again`` names it. ``python -m benchmarks.tables`` makes the table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.memory_limit import run_limited
from benchmarks.common.record import Record, Results, captioned, markdown_table
from localrt.bench.process import child_command
from localrt.bench.report import to_json, to_table
from localrt.bench.workload import BenchOptions, Workload
from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_bytes, format_rate
from localrt.common.settings import Settings
from localrt.offload import hardware

PACKAGES = ("llama-cpp-python", "torch", "transformers", "accelerate", "numpy")
MB = 1_000_000
LLAMACPP = ("plain", "repacked")  # both mapped


def _row(engine: str, megabytes: int, prompt: int, tokens: int) -> tuple[str, Any]:
    workload = Workload(prompt_tokens=prompt, tokens=tokens, runs=5)
    return f"{megabytes} MB {engine}", (engine, megabytes * MB, workload)


_LIMITS = (1000, 850, 700, 500)
ROWS: Mapping[str, tuple[str, int, Workload]] = dict(
    [
        *(_row("native", limit, 32, 64) for limit in _LIMITS),
        *(_row("llamacpp", limit, 8, 16) for limit in _LIMITS),
        # Which needs as much, and some seconds a token.
        _row("accelerate", 2500, 8, 4),
    ]
)
"""An engine under a limit of bytes, in the order they are measured: what matters most first."""


def measure(name: str, path: Path, threads: int, machine: hardware.Machine) -> Record:
    """Run a row; what an engine could not do stands in ``skipped``."""
    engine, limit, workload = ROWS[name]
    options = BenchOptions(
        path=path,
        engines=(engine,),
        workload=workload,
        threads=threads,
        settings={"llamacpp": LLAMACPP},
    )
    row: Record = {"name": name, "memory_limit": limit}
    try:
        outcome = run_limited(options, limit, partial(command, path))
    except LocalrtError as error:
        return {**row, "results": [], "skipped": [{"reason": str(error)}]}
    print(to_table(outcome, options, name=path.name, machine=machine), flush=True)
    report = to_json(outcome, options, name="", machine=machine, versions={}, command="")
    for key in ("machine", "versions", "command", "model"):
        del report[key]
    return {**row, **report}


def command(path: Path, engine: str) -> list[str]:
    """What starts the process of ``engine``; one that streams layers gets a folder in bf16."""
    if engine != "accelerate":
        return child_command()
    from benchmarks.accelerate_peer import bf16_folder  # which needs torch

    cache = Settings.from_environment().cache_dir / "bench"
    cache.mkdir(parents=True, exist_ok=True)
    folder = bf16_folder(path, cache / f"{path.stem}-bf16")
    return [*child_command("benchmarks.accelerate_peer"), str(folder)]


_HEADERS = (
    *("memory limit", "engine", "decode tok/s", "predicted"),
    *("pipeline busy", "read per token", "peak"),
)


def offload_table(record: Mapping[str, Any]) -> str:
    """Limits by engines, from ``offload.json``: the largest first, native before the others."""
    rows = sorted(
        record["rows"], key=lambda row: (-row["memory_limit"], not row["name"].endswith("native"))
    )
    best = [(row["memory_limit"], result) for row in rows for result in _best(row)]
    lines = []
    for limit, result in best:
        notes, rate = [], result["decode_tok_s"]
        for other, peer in best if result["engine"] == "native" else ():
            if other == limit and peer["engine"] == "llamacpp":
                notes.append(f"{rate / peer['decode_tok_s']:.1f}x llama.cpp")
            elif limit == 1000 * MB and other > limit:
                notes.append(f"{rate / peer['decode_tok_s']:.0f}x {peer['engine']}")
        lines.append(_line(format_bytes(limit), result, notes))
    for row in rows:
        for skip in row["skipped"] if not row["results"] else ():
            cells = [format_bytes(row["memory_limit"]), skip.get("engine", ""), skip["reason"]]
            lines.append([*cells, "", "", "", ""])
    return captioned(record, markdown_table(_HEADERS, lines))


def _line(limit: str, result: Mapping[str, Any], notes: list[str]) -> list[str]:
    rate = format_rate(result["decode_tok_s"]) + (f" ({', '.join(notes)})" if notes else "")
    busy, read = result.get("pipeline_efficiency"), result.get("read_bytes_per_token")
    peak = result.get("peak_cgroup_bytes") or result["peak_ram_bytes"]
    return [
        limit,
        f"{result['engine']} ({result['setting']})" if result["setting"] else result["engine"],
        rate,
        format_rate(result.get("predicted_tok_s")),
        "-" if busy is None else f"{100 * busy:.0f} %",
        "-" if read is None else format_bytes(read),
        format_bytes(peak),
    ]


def _best(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The fastest setting for decoding, if one ran."""
    results = row["results"]
    return [max(results, key=lambda result: float(result["decode_tok_s"]))] if results else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, row by row."""
    parser = make_parser(__doc__, results="offload", rows=True)
    parser.add_argument("model", nargs="?", default="qwen1.5b", metavar="MODEL")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    path, machine = find_model(args.model), hardware.probe()
    cited = f"{cited_command('offload', [path.name])} --threads {args.threads}"
    results = Results(args.json, cited, *PACKAGES, model=path.name)
    for name in results.pending(ROWS, args.only, args.again):
        results.put(measure(name, path, args.threads, machine), ROWS)
    print(offload_table(results.record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
