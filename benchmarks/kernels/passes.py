"""One pass of a model over n rows behind a context, beside llama.cpp: small batches, long contexts.

    python -m benchmarks.kernels.passes MODEL.gguf [--rows 1,2,4,8,16] [--held 8,8192]

The passes of both engines alternate in one process; llama.cpp is measured with weights repacked and
plain, with flash attention and without, and its best of each line counts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common.command import cited_command, find_model, make_parser, numbers
from benchmarks.common.record import Record, Results, captioned, markdown_table
from benchmarks.common.turns import against_llamacpp, open_sessions
from localrt.bench.engines import LLAMACPP_SETTINGS
from localrt.common.formatting import format_rate
from localrt.offload import hardware

IDS = 1000  # of random tokens: any vocabulary has more


def measure(sessions: Mapping[str, Any], held: int, rows: int, runs: int) -> Record:
    """Seconds of a pass of each session, by turns."""
    tokens = np.random.default_rng(rows).integers(0, IDS, rows).tolist()

    def one(session: Any) -> None:
        session.trim(held)
        session.extend(tokens)

    found = against_llamacpp(sessions, one, runs, settle=0.0)
    for session in sessions.values():
        session.trim(held)
    return {"name": f"{rows} rows behind {held}", "held": held, "rows": rows, **found}


def passes_table(record: Mapping[str, Any]) -> str:
    """Tokens per second of a pass, by its number of rows and the context before it."""
    rows = []
    for r in record["rows"]:
        theirs = r["llamacpp_s"][r["best_setting"]]
        rows.append(
            [
                str(r["held"]),
                str(r["rows"]),
                format_rate(r["rows"] / r["native_s"]),
                f"{format_rate(r['rows'] / theirs)} ({r['best_setting']})",
                f"{r['times_llamacpp']:.2f}x",
            ]
        )
    headers = ["context", "rows", "native tok/s", "llama.cpp tok/s", "ratio"]
    return captioned(record, markdown_table(headers, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print."""
    parser = make_parser(__doc__, runs=7)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--held", type=numbers, default=[8], help="tokens in the cache before")
    known = list(LLAMACPP_SETTINGS)
    parser.add_argument("--setting", nargs="+", choices=known, help="llama.cpp's (default: all)")
    args = parser.parse_args(arguments)
    path, threads = find_model(args.model), hardware.probe().cpu.cores.threads
    command = cited_command("kernels.passes", arguments)
    results = Results(args.json, command, "llama-cpp-python", model=path.name)
    capacity = max(args.held) + max(args.rows) + 1
    settings = args.setting or known
    with open_sessions(path, capacity, threads=threads, settings=settings) as sessions:
        text = np.random.default_rng(0).integers(0, IDS, max(args.held)).tolist()
        for held in sorted(args.held):
            for session in sessions.values():
                session.extend(text[len(session.tokens) : held])
            for rows in args.rows:
                results.put(measure(sessions, held, rows, args.runs))
    print(passes_table(results.record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
