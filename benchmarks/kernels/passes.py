"""One pass of a model over n rows behind a context, beside llama.cpp: small batches, long contexts.

    python -m benchmarks.kernels.passes MODEL.gguf [--rows 1,2,4,8,16] [--held 8,8192]

The passes of both engines alternate in one process; llama.cpp is measured with weights repacked and
plain, with flash attention and without, and its best of each line counts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.record import Record, save, setting
from benchmarks.common.sessions import against_llamacpp, by_turns, open_sessions
from benchmarks.kernels.tables import passes_table
from localrt.bench.engines import LLAMACPP_SETTINGS
from localrt.offload import hardware

IDS = 1000  # of random tokens: any vocabulary has more


def measure(sessions: dict[str, Any], held: int, rows: int, runs: int) -> Record:
    """Seconds of a pass of each session, by turns."""
    tokens = np.random.default_rng(rows).integers(0, IDS, rows).tolist()

    def one(session: Any) -> None:
        session.trim(held)
        session.extend(tokens)

    calls = {name: lambda s=session: one(s) for name, session in sessions.items()}
    found = against_llamacpp(by_turns(calls, runs, settle=0.0))
    for session in sessions.values():
        session.trim(held)
    return {"held": held, "rows": rows, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print."""
    parser = make_parser(__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--held", default="8", help="tokens in the cache before the pass")
    parser.add_argument("--runs", type=int, default=7)
    known = list(LLAMACPP_SETTINGS)
    parser.add_argument(
        "--setting", action="append", choices=known, help="llama.cpp's (default: all)"
    )
    args = parser.parse_args(arguments)
    path, threads = find_model(args.model), hardware.probe().cpu.cores.threads
    contexts = sorted(map(int, args.held.split(",")))
    rows = [int(text) for text in args.rows.split(",")]
    capacity = contexts[-1] + max(rows) + 1
    results: list[Record] = []
    record = {
        **setting(cited_command("kernels.passes", arguments), "llama-cpp-python"),
        "model": path.name,
        "results": results,
    }
    settings = args.setting or known
    with open_sessions(path, capacity, threads=threads, settings=settings) as sessions:
        text = np.random.default_rng(0).integers(0, IDS, contexts[-1]).tolist()
        for held in contexts:
            for session in sessions.values():
                session.extend(text[len(session.tokens) : held])
            results += [measure(sessions, held, count, args.runs) for count in rows]
            save(args.json, record)
    print(passes_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
