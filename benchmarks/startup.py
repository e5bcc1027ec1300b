"""From Enter to the first token: `localrt run MODEL hi`, cold and warm, and its peak memory.

    .venv/bin/python benchmarks/startup.py [MODEL ...] [--runs 7] [--json FILE]

Cold drops the system's file cache before each run, for which it must be root; else it is left out.
Also the start-up of the commands that answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import localrt  # noqa: E402
from localrt.formatting import table  # noqa: E402
from localrt.machine import hardware  # noqa: E402

_DROP = Path("/proc/sys/vm/drop_caches")


def first_byte(model: str) -> tuple[float, float, int]:
    """Seconds to the first byte of the answer, to the end, and peak resident bytes."""
    command = [sys.executable, "-m", "localrt", "run", model, "hi", "--max-tokens", "8"]
    start = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    child.stdout.read(1)
    first = time.perf_counter() - start
    child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"localrt run {model} failed: run it by hand to see why")
    return first, time.perf_counter() - start, usage.ru_maxrss * 1024


def measure(model: str, runs: int, *, cold: bool) -> dict[str, Any]:
    """Medians over ``runs`` processes, after one that warms up."""
    samples = []
    for _ in range(runs + 1):
        if cold:
            os.sync()
            _DROP.write_text("3\n")
        samples.append(first_byte(model))
    firsts, ends, peaks = zip(*samples[1:], strict=True)
    return {
        "what": f"run {Path(model).name} hi, {'cold' if cold else 'warm'}",
        "first_token_s": statistics.median(firsts),
        "end_s": statistics.median(ends),
        "peak_ram_bytes": max(peaks),
    }


def command_time(arguments: list[str], runs: int) -> dict[str, Any]:
    """Median seconds of a command."""
    samples = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, check=True
        )
        samples.append(time.perf_counter() - start)
    return {"what": " ".join(arguments), "end_s": statistics.median(samples[1:])}


def main() -> int:
    parser = argparse.ArgumentParser(description="start-up of the command line")
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for model in args.models:
        results.append(measure(model, args.runs, cold=False))
        if os.access(_DROP, os.W_OK):
            results.append(measure(model, args.runs, cold=True))
    for command in ("--help", "list", "doctor --quick"):
        results.append(command_time(["localrt", *command.split()], args.runs))
    rows = [
        [
            r["what"],
            f"{r['first_token_s']:.2f} s" if "first_token_s" in r else "",
            f"{r['end_s']:.3f} s",
            f"{r['peak_ram_bytes'] / 1e6:.0f} MB" if "peak_ram_bytes" in r else "",
        ]
        for r in results
    ]
    print(table(rows, ["command", "first token", "end", "peak memory"], "lrrr"))
    if args.json:
        record = {
            "machine": hardware.probe().to_dict(),
            "versions": {"localrt": localrt.__version__},
            "command": "benchmarks/startup.py",
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
