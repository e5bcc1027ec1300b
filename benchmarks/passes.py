"""One pass of a model over n rows behind a context, beside llama.cpp: small batches, long contexts.

    .venv/bin/python benchmarks/passes.py MODEL.gguf [--rows 1,2,4,8,16] [--held 8,8192]

The passes of both engines alternate in one process; llama.cpp is measured with weights repacked and
plain, with flash attention and without, and its best of each line counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import localrt  # noqa: E402
from localrt.engine.llamacpp.engine import LlamaCppEngine, LlamaCppSettings  # noqa: E402
from localrt.formatting import format_rate, table  # noqa: E402
from localrt.loading.parts import LoadOptions, load_parts  # noqa: E402
from localrt.machine import hardware  # noqa: E402

THEIRS = {
    f"{'repacked' if repack else 'plain'}{', flash attention' if flash else ''}": (repack, flash)
    for repack in (True, False)
    for flash in (False, True)
}


def measure(
    sessions: dict[str, Any], held: int, rows: int, runs: int, vocab: int
) -> dict[str, float]:
    """Median seconds of a pass of each session, by turns."""
    tokens = np.random.default_rng(rows).integers(0, vocab, rows).tolist()
    samples: dict[str, list[float]] = {name: [] for name in sessions}
    for run in range(runs + 1):
        for name, session in sessions.items():
            time.sleep(0.03)  # the other's threads spin for a while
            for _ in range(2):  # the first wakes ours
                start = time.perf_counter()
                session.extend(tokens)
                seconds = time.perf_counter() - start
                session.trim(held)
            if run:
                samples[name].append(seconds)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="passes of few rows beside llama.cpp")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--held", default="8", help="tokens in the cache before the pass")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--kv", default="bf16", help="the native engine's cache: bf16 or int8")
    parser.add_argument("--settings", default=",".join(THEIRS), help="llama.cpp's, with commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = hardware.probe()
    threads = machine.cpu.usable_cores
    contexts = sorted(map(int, args.held.split(",")))
    rows = list(map(int, args.rows.split(",")))
    capacity = contexts[-1] + max(rows) + 1
    options = LoadOptions(engine="native", ctx=capacity, threads=threads)
    engines: dict[str, Any] = {"native": load_parts(args.model, options).engine}
    for name, (repack, flash) in THEIRS.items():
        if name in args.settings:
            engines[name] = LlamaCppEngine.load(
                args.model,
                threads=threads,
                settings=LlamaCppSettings(repack=repack, flash_attention=flash),
            )
    vocab = engines["native"].info.vocab_size
    sessions = {name: engine.session(capacity) for name, engine in engines.items()}
    text = np.random.default_rng(0).integers(0, vocab, contexts[-1]).tolist()
    results = []
    for held in contexts:
        for session in sessions.values():
            session.extend(text[len(session.tokens) : held])
        for count in rows:
            seconds = measure(sessions, held, count, args.runs, vocab)
            ours = seconds.pop("native")
            best = min(seconds, key=lambda name: seconds[name])
            results.append(
                {
                    "held": held,
                    "rows": count,
                    "native_s": ours,
                    "llamacpp_s": seconds,
                    "best_setting": best,
                    "times_llamacpp": seconds[best] / ours,
                }
            )
            print(describe(results[-1:]).splitlines()[-1], flush=True)
    print(describe(results))
    if args.json:
        record = {
            "machine": machine.to_dict(),
            "command": f"benchmarks/passes.py {args.model.name} --held {args.held} "
            f"--rows {args.rows} --settings '{args.settings}' --runs {args.runs}",
            "model": args.model.name,
            "versions": {
                "localrt": localrt.__version__,
                "llama-cpp-python": version("llama-cpp-python"),
            },
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def describe(results: list[dict[str, Any]]) -> str:
    """The table for people."""
    rate: Callable[[float, int], str] = lambda seconds, rows: format_rate(rows / seconds)  # noqa: E731
    cells = [
        [
            str(r["held"]),
            str(r["rows"]),
            f"{r['native_s'] * 1e3:.1f}",
            rate(r["native_s"], r["rows"]),
            f"{r['llamacpp_s'][r['best_setting']] * 1e3:.1f}",
            rate(r["llamacpp_s"][r["best_setting"]], r["rows"]),
            r["best_setting"],
            f"{r['times_llamacpp']:.2f}x",
        ]
        for r in results
    ]
    headers = ["held", "rows", "ms", "tok/s", "llama.cpp ms", "tok/s", "its setting", "ratio"]
    return table(cells, headers, "rrrrrrlr")


if __name__ == "__main__":
    sys.exit(main())
