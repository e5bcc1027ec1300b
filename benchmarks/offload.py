"""Models larger than memory, measured: every number of the offloading pipeline by one command.

    python -m benchmarks.offload [MODEL] [--only WORDS] [--again WORDS]

Each engine runs in a memory control group (root, or a delegated one), the page cache dropped
before it. Rows are saved as they are done, and a row that is there is not measured again unless
``--again`` names it. ``python -m benchmarks.tables`` makes the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.memory_limit import run_limited
from benchmarks.common.record import (
    Record,
    load,
    machine_of,
    markdown_table,
    pending,
    save_row,
    setting,
    versions_of,
)
from benchmarks.peers.airllm_env import peer_python
from benchmarks.peers.hf_folder import hf_folder
from localrt.bench.process import child_command
from localrt.bench.report import to_json, to_table
from localrt.bench.workload import BenchOptions, Workload
from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_bytes, format_rate
from localrt.common.settings import Settings
from localrt.offload import hardware

PACKAGES = ("llama-cpp-python", "torch", "transformers", "accelerate", "numpy")
MB = 1_000_000

LIMITS = tuple(size * MB for size in (1000, 850, 700, 500))
STREAMERS_LIMIT = 2500 * MB  # what Accelerate and AirLLM need
LLAMACPP = ("plain", "repacked")  # both mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: an engine under a limit in bytes."""

    engine: str
    limit: int
    workload: Workload

    @property
    def name(self) -> str:
        """What ``--only`` and ``--again`` look for."""
        return f"{self.limit // MB} MB {self.engine}"


def all_rows() -> Iterator[Row]:
    """In the order they are measured: what matters most first, the slow peers last."""
    for limit in LIMITS:
        yield Row(
            engine="native",
            limit=limit,
            workload=Workload(prompt_tokens=32, tokens=64, runs=5),
        )
    for limit in LIMITS:
        yield Row(
            engine="llamacpp",
            limit=limit,
            workload=Workload(prompt_tokens=8, tokens=16, runs=5),
        )
    # Tens of seconds a token.
    for engine, tokens in (("accelerate", 4), ("airllm", 3)):
        yield Row(
            engine=engine,
            limit=STREAMERS_LIMIT,
            workload=Workload(prompt_tokens=8, tokens=tokens, runs=5),
        )


def measure(row: Row, path: Path, threads: int, machine: hardware.Machine) -> Record:
    """Run a row; what an engine could not do stands in ``skipped``."""
    options = BenchOptions(
        path=path,
        engines=(row.engine,),
        workload=row.workload,
        threads=threads,
        settings={"llamacpp": LLAMACPP},
    )
    try:
        outcome = run_limited(options, row.limit, partial(command, path))
    except LocalrtError as error:
        return {"name": row.name, "results": [], "skipped": [{"reason": str(error)}]}
    print(to_table(outcome, options, name=path.name, machine=machine), flush=True)
    return {"name": row.name, "memory_limit": row.limit, **to_json(outcome, options)}


def command(path: Path, engine: str) -> list[str]:
    """What starts the process of ``engine``; one that streams layers gets a folder in bf16."""
    if engine not in ("accelerate", "airllm"):
        return child_command()
    folder = hf_folder(path, Settings.from_environment().cache_dir / "bench", notify=print)
    python = str(peer_python(engine) or sys.executable)
    return [*child_command("benchmarks.peers.streamers", python), str(folder)]


Result = Mapping[str, Any]

_HEADERS = (
    *("memory limit", "engine", "decode tok/s", "predicted"),
    *("pipeline busy", "read per token", "peak"),
)


def offload_table(record: Mapping[str, Any]) -> str:
    """Limits by engines, from ``offload.json``: the largest first, native before the others."""
    rows = sorted(
        record["rows"], key=lambda row: (-row["memory_limit"], not row["name"].endswith("native"))
    )
    lines: list[list[str]] = []
    streamers: list[tuple[str, float]] = []  # accelerate and the like: under the largest limit
    for row in rows:
        limit = row["memory_limit"]
        theirs = [
            result["decode_tok_s"]
            for other in rows
            if other["memory_limit"] == limit
            for result in other["results"]
            if result["engine"] == "llamacpp"
        ]
        for result in _best(row):
            notes, rate = [], result["decode_tok_s"]
            if result["engine"] == "native":
                notes += [f"{rate / max(theirs):.1f}x llama.cpp"] if theirs else []
                if limit == 1_000_000_000:
                    notes += [f"{rate / slow:.0f}x {name}" for name, slow in streamers]
            elif result["engine"] != "llamacpp":
                streamers.append((result["engine"], rate))
            lines.append(_line(format_bytes(limit), result, notes))
        if not row["results"]:
            for skip in row["skipped"]:
                lines.append([format_bytes(limit), skip.get("engine", ""), skip["reason"]])
                lines[-1] += [""] * 4
    return (
        f"{markdown_table(_HEADERS, lines)}\n\n`{record['command']}` on {machine_of(record)}; "
        f"medians. {versions_of(record)}."
    )


def _line(limit: str, result: Result, notes: list[str]) -> list[str]:
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


def _best(row: Mapping[str, Any]) -> list[Result]:
    """Each engine's fastest setting for decoding."""
    best: dict[str, Result] = {}
    for result in row["results"]:
        known = best.get(result["engine"])
        if known is None or result["decode_tok_s"] > known["decode_tok_s"]:
            best[result["engine"]] = result
    return list(best.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, row by row."""
    parser = make_parser(__doc__, results="offload")
    parser.add_argument("model", nargs="?", default="qwen1.5b", metavar="MODEL")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this")
    parser.add_argument("--again", action="append", default=[], help="measure these anew")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    path, machine = find_model(args.model), hardware.probe()
    record = load(args.json, rows=[])
    rows = list(all_rows())
    where = setting(f"{cited_command('offload', [path.name])} --threads {args.threads}", *PACKAGES)
    todo = pending(rows, record, args.only, args.again)
    for number, row in enumerate(todo, 1):
        print(f"{row.name} ({number} of {len(todo)})", flush=True)
        made = measure(row, path, args.threads, machine)
        order = [row.name for row in rows]
        record = save_row(args.json, record, made, order, **where, model=path.name)
    print(offload_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
