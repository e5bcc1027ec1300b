"""From Enter to the first token: `localrt run MODEL hi`, cold and warm, and its peak memory.

    python -m benchmarks.app.startup [MODEL ...] [--runs 7] [--json FILE]

Cold drops the system's file cache before each run, for which it must be root; else it is left out.
Also the start-up of the commands that answer at once.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.command import ROOT, cited_command, make_parser
from benchmarks.common.record import Record, save, setting
from benchmarks.common.timing import by_turns
from localrt.formatting import table

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


def measure(model: str, runs: int, *, cold: bool) -> Record:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print."""
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args(arguments)
    results = []
    for model in args.models:
        results.append(measure(model, args.runs, cold=False))
        if os.access(_DROP, os.W_OK):
            results.append(measure(model, args.runs, cold=True))
    for name in ("--help", "list", "doctor --quick"):
        command = [sys.executable, "-m", "localrt", *name.split()]

        def run(command: list[str] = command) -> None:
            subprocess.run(command, cwd=ROOT, capture_output=True, check=True)

        samples = by_turns({name: run}, args.runs)[name]
        results.append({"what": f"localrt {name}", "end_s": statistics.median(samples)})
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
    save(args.json, {**setting(cited_command("app.startup", arguments)), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
