"""How often an expert that a decoded token needs is in memory: localrt's policy on routing traces.

    python -m benchmarks.moe.cache [TRACE ...] [--cache 0.25,0.5]

Beside it are least recently used and Belady's optimum, which knows the future. ``--cache`` are
shares of the experts that fit. Traces are those that ``benchmarks.moe.record_trace`` wrote; without
one the fixture's routing is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import Record, save, setting
from benchmarks.moe.fixture_gguf import FIXTURE
from benchmarks.moe.hit_rates import hit_rates
from benchmarks.moe.record_trace import record_trace
from benchmarks.moe.routing_trace import RoutingTrace
from benchmarks.moe.tables import hit_rates_table
from localrt.errors import LocalrtError, OptionError


def measure(traces: Mapping[str, RoutingTrace], shares: Sequence[float], command: str) -> Record:
    """Every trace's decoding with every share of the experts in memory."""
    rows: list[dict[str, Any]] = []
    for name, trace in traces.items():
        decoded = trace.decoding()
        for share in shares:
            slots = max(1, round(share * trace.header.layers * trace.header.count))
            row = {"trace": name, "cached": share, "slots": slots, "tokens": decoded.tokens}
            rows.append(row | {"hit_rates": hit_rates(decoded, slots)})
    headers = [{"trace": name, **asdict(trace.header)} for name, trace in traces.items()]
    return {**setting(command, "numpy"), "traces": headers, "hit_rates": rows}


def _shares(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0 < share <= 1 for share in shares):
        raise OptionError(f"--cache {text}: shares must be above 0 and at most 1")
    return shares


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, save, print."""
    parser = make_parser(__doc__, results="moe_cache")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--cache", default="0.25,0.5", help="shares of the experts held")
    args = parser.parse_args(arguments)
    try:
        shares = _shares(args.cache)
        traces = {path.stem: RoutingTrace.load(path) for path in args.traces}
        traces = traces or {"fixture-moe": record_trace(FIXTURE)}
        record = measure(traces, shares, cited_command("moe.cache", arguments))
    except LocalrtError as error:
        print(f"moe.cache: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    save(args.json, record)
    print(hit_rates_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
