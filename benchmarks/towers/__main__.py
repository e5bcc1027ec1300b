"""Encoding a picture on the CPU beside llama.cpp's libmtmd, by turns.

    python -m benchmarks.towers [--towers qwen3.5-4b,...] [--side 896] [--runs 5] [--json FILE]

Towers have real shapes and random weights, in one ``mmproj`` file of F16 matrices for both. A run
prepares and encodes a picture that was not seen before; the first one warms up. Both use all cores;
peak memory is that of each one's process.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, listed, make_parser
from benchmarks.common.record import machine_of, markdown_table, save, setting, versions_of
from benchmarks.towers.models import TOWERS, write_tower
from localrt.bench.process import ChildProcess, child_command

ENGINES = ("localrt", "libmtmd")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure tower by tower, save, print."""
    parser = make_parser(__doc__, results="towers")
    parser.add_argument("--towers", type=listed(tuple(TOWERS)), default=tuple(TOWERS))
    parser.add_argument("--side", type=int, default=896, help="of the picture, in pixels")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    rows = []
    for name in args.towers:
        rows.append({"tower": name, "side": args.side, **measure(name, args.side, args.runs)})
        print(f"{name} is done", flush=True)
    about = setting(cited_command("towers", arguments), "numpy", "llama-cpp-python")
    record = {**about, "rows": rows}
    save(args.json, record)
    print(towers_table(record))
    return 0


def measure(name: str, side: int, runs: int) -> dict[str, Any]:
    """Seconds and peak bytes of both, by turns."""
    samples: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        mmproj, text = write_tower(name, Path(folder))
        children = {}
        try:
            for engine in ENGINES:
                child = children[engine] = ChildProcess(child_command("benchmarks.towers.child"))
                child.ask("load", engine=engine, mmproj=str(mmproj), text=str(text))
            for run in range(runs + 1):
                for engine, child in children.items():
                    found = child.ask("encode", side=side, seed=run)
                    if run:
                        samples[engine].append(found)
        finally:
            for child in children.values():
                child.close()
        nbytes = mmproj.stat().st_size
    ours, theirs = (samples[engine] for engine in ENGINES)
    ratios = [b["s"] / a["s"] for a, b in zip(ours, theirs, strict=True)]
    peaks = {engine: max(one["peak_bytes"] for one in samples[engine]) for engine in ENGINES}
    return {
        "file_bytes": nbytes,
        "rows": {engine: samples[engine][0]["rows"] for engine in ENGINES},
        "seconds": {e: statistics.median(one["s"] for one in samples[e]) for e in ENGINES},
        "faster": statistics.median(ratios),
        "peak_bytes": peaks,
        "memory": peaks["localrt"] / peaks["libmtmd"],
        "runs": [[one["s"] for one in samples[engine]] for engine in ENGINES],
    }


def towers_table(record: Mapping[str, Any]) -> str:
    """Seconds, memory and rows of both."""
    rows = [
        [
            row["tower"],
            f"{row['seconds']['localrt']:.2f}",
            f"{row['seconds']['libmtmd']:.2f}",
            f"{row['faster']:.1f}x",
            f"{row['peak_bytes']['localrt'] / 1e6:.0f}",
            f"{row['peak_bytes']['libmtmd'] / 1e6:.0f}",
            f"{row['memory']:.2f}x",
            f"{row['rows']['localrt']}, {row['rows']['libmtmd']}",
        ]
        for row in record["rows"]
    ]
    headers = ["tower", "localrt, s", "libmtmd, s", "faster", "localrt, MB", "libmtmd, MB"]
    table = markdown_table([*headers, "memory", "rows"], rows)
    about = f"`{record['command']}`, medians, on {machine_of(record)}. {versions_of(record)}."
    return f"{table}\n\n{about}"


if __name__ == "__main__":
    sys.exit(main())
