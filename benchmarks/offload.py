"""Measures models larger than memory: all figures of the offloading pipeline by one command.

    python -m benchmarks.offload [MODEL] [--only WORD ...] [--again WORD ...]

Each engine runs in a memory control group (which needs root or a delegated group), after the page
cache has been dropped. Rows are saved as they are done, and a saved row is not measured again
unless ``--again`` names it. ``python -m benchmarks.tables`` makes the table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.memory_limit import run_limited
from benchmarks.common.record import Record, Results, captioned, markdown_table
from localrt.bench.report import to_table
from localrt.bench.workload import BenchOptions, Workload
from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_bytes, format_rate
from localrt.offload import hardware

PACKAGES = ("llama-cpp-python", "numpy")
MB = 1_000_000
LLAMACPP = ("plain", "repacked")  # both memory-mapped


_WORKLOADS = {
    "native": Workload(prompt_tokens=32, tokens=64, runs=5),
    "llamacpp": Workload(prompt_tokens=8, tokens=16, runs=5),
}
ROWS = {
    f"{limit} MB {engine}": (engine, limit * MB)
    for engine in _WORKLOADS
    for limit in (1000, 850, 700, 500)
}
"""Engines and their limits in bytes, in the order of measurement: most important first."""


def measure(name: str, path: Path, threads: int, machine: hardware.Machine) -> Record:
    """Run a row, and keep its fastest setting; ``skipped`` says what an engine could not do."""
    engine, limit = ROWS[name]
    options = BenchOptions(
        path=path,
        engines=(engine,),
        workload=_WORKLOADS[engine],
        threads=threads,
        settings={"llamacpp": LLAMACPP},
    )
    row: Record = {"name": name, "engine": engine, "memory_limit": limit}
    try:
        outcome = run_limited(options, limit)
    except LocalrtError as error:
        return {**row, "skipped": str(error)}
    print(to_table(outcome, options, name=path.name, machine=machine), flush=True)
    if not outcome.results:
        return {**row, "skipped": outcome.skipped[0].reason}
    best = max(outcome.results, key=lambda result: float(result.metrics["decode_tok_s"]))
    return {**row, "setting": best.setting, **{key: best.metrics.get(key) for key in _KEPT}}


_KEPT = (
    *("decode_tok_s", "predicted_tok_s", "pipeline_efficiency", "read_bytes_per_token"),
    *("peak_cgroup_bytes", "peak_ram_bytes"),
)
_HEADERS = (
    *("memory limit", "engine", "decode tok/s", "predicted"),
    *("pipeline busy", "read per token", "peak"),
)


def offload_table(record: Mapping[str, Any]) -> str:
    """A table of limits and engines from ``offload.json``: largest limit and native first."""
    rows = sorted(record["rows"], key=lambda row: (-row["memory_limit"], row["engine"] != "native"))
    llamacpp = {row["memory_limit"]: row for row in rows if row["engine"] == "llamacpp"}
    lines = []
    for row in rows:
        limit = format_bytes(row["memory_limit"])
        if "skipped" in row:
            lines.append([limit, row["engine"], row["skipped"], "", "", "", ""])
            continue
        busy, read = row["pipeline_efficiency"], row["read_bytes_per_token"]
        peer = llamacpp.get(row["memory_limit"], {}).get("decode_tok_s")
        times = ""
        if peer and row["engine"] == "native":
            times = f" ({row['decode_tok_s'] / peer:.1f}x llama.cpp)"
        lines.append(
            [
                limit,
                f"{row['engine']} ({row['setting']})" if row["setting"] else row["engine"],
                f"{format_rate(row['decode_tok_s'])}{times}",
                format_rate(row["predicted_tok_s"]),
                "-" if busy is None else f"{100 * busy:.0f} %",
                "-" if read is None else format_bytes(read),
                format_bytes(row["peak_cgroup_bytes"] or row["peak_ram_bytes"]),
            ]
        )
    return captioned(record, markdown_table(_HEADERS, lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure missing rows, one by one."""
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
