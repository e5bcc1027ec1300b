"""Experts on the SSD: a mixture under a memory limit, against llama.cpp's mapped file.

    python -m benchmarks.moe.ssd [FOLDER] [--experts BYTES] [--shares 0.5,0.25] [--guesses]

The trained fixture is widened until its experts take ``--experts`` bytes, which changes neither its
function nor its routing, and written as one GGUF file that both engines run. Each runs in a memory
control group (root, or a delegated one; ``--no-limit`` gives the native engine ``ram=`` instead)
that has room for a share of the experts, for all other weights, and for 150 MB of process. Text
that the model has not learnt is decoded token by token as it stands: greedy text of a small model
repeats itself, and its routing with it.

``--guesses`` measures instead whether reading experts ahead of their need pays: never, always (by
the next layer's gate), and where localrt measures that it pays. ``--card`` does so on a virtual
card, whose seconds are simulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import RESULTS, ROOT, cited_command, make_parser
from benchmarks.common.record import Record, save, setting
from benchmarks.moe.fixture_gguf import FIXTURE, held_out, widened
from benchmarks.moe.ssd_child import PROMPT
from benchmarks.moe.tables import guesses_table, ssd_table
from localrt.bench.memory_limit import MemoryLimit
from localrt.bench.page_cache import drop_from_cache
from localrt.bench.process import ChildProcess, child_command

PROCESS = 150_000_000  # what each engine's process may take beside weights
ROUNDS = 5  # and a text to warm up
DECODED = {"native": 64, "llamacpp": 16}  # tokens: a mapped file takes seconds for each
GUESSES = ("off", "gates", "measured")


def measure(
    path: Path,
    limit: int | None,
    texts: Sequence[list[int]],
    *,
    engine: str = "native",
    repack: bool = False,
    guesses: str = "measured",
    options: Mapping[str, Any] | None = None,
) -> Record:
    """One process: medians over its texts but the first."""
    drop_from_cache([path])
    group = None if limit is None else MemoryLimit.create(limit)
    command = child_command(module="benchmarks.moe.ssd_child")
    with ChildProcess(command, group) as child:
        loaded = {"engine": engine, "path": str(path), "repack": repack, "guesses": guesses}
        child.ask("load", **loaded, options=dict(options or {}))
        rounds = [child.ask("decode", tokens=tokens) for tokens in texts][1:]
        found: Record = {
            "engine": engine,
            "repacked": repack,
            "mode": guesses,
            "sources": child.ask("prefetching"),
            "peak_cgroup_bytes": None if group is None else group.peak(),
        }
    for name in rounds[0]:
        values = [each[name] for each in rounds if each[name] is not None]
        found[name] = statistics.median(values) if values else None
    return {**found, "rounds": rounds}


def engines(args: argparse.Namespace, path: Path, limit: int) -> list[Record]:
    """localrt, and llama.cpp with the weights as they are, or repacked too."""
    texts = held_out(args.folder, ROUNDS + 1, PROMPT + max(DECODED.values()), 512)
    rows = []
    for engine in args.engines.split(","):
        for repack in (False, True) if engine == "llamacpp" and args.repacked else (False,):
            cut = [tokens[: PROMPT + DECODED[engine]] for tokens in texts]
            bounded = None if args.no_limit and engine == "native" else limit
            options = {"ram": limit} if args.no_limit and engine == "native" else {}
            row = measure(path, bounded, cut, engine=engine, repack=repack, options=options)
            rows.append(row)
    return rows


def prefetching(args: argparse.Namespace, path: Path, limit: int) -> list[Record]:
    """Each of ``GUESSES`` by turns; of each the run of the median rate."""
    texts = held_out(args.folder, 4, PROMPT + args.tokens, 2 * (PROMPT + args.tokens))
    options: dict[str, Any] = {"ram": limit} if args.no_limit else {}
    if args.card:
        options = {"device": args.card}
    bounded = None if options else limit
    runs: dict[str, list[Record]] = {name: [] for name in GUESSES}
    for _ in range(args.runs):
        for name, found in runs.items():
            found.append(measure(path, bounded, texts, guesses=name, options=options))
    ranked = {name: sorted(found, key=lambda run: run["tok_s"]) for name, found in runs.items()}
    middle = {name: found[len(found) // 2] for name, found in ranked.items()}
    return [
        {**row, "all_tok_s": [run["tok_s"] for run in runs[name]]} for name, row in middle.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the widened file, measure, and keep the results."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURE, help="of the fixture")
    parser.add_argument("--experts", type=int, default=1_500_000_000, help="bytes")
    parser.add_argument("--shares", default="0.5,0.25")
    parser.add_argument("--engines", default="native,llamacpp")
    parser.add_argument("--repacked", action="store_true", help="llama.cpp repacked too")
    parser.add_argument("--guesses", action="store_true", help="measure reading ahead")
    parser.add_argument("--tokens", type=int, default=192, help="of each text, with --guesses")
    parser.add_argument("--runs", type=int, default=3, help="with --guesses")
    parser.add_argument("--no-limit", action="store_true", help="no control group, but ram=")
    parser.add_argument("--card", help="such as virtual:400MB@12GB/s,256GB/s,20TFLOPS")
    args = parser.parse_args(arguments)
    args.json = args.json or RESULTS / (
        "experts_prefetch.json" if args.guesses else "experts_ssd.json"
    )
    path = widened(args.folder, args.experts, ROOT / "build/benchmarks")
    rest = path.stat().st_size - args.experts
    training = json.loads((args.folder / "training.json").read_text())
    record: Record = {
        **setting(cited_command("moe.ssd", arguments), "llama-cpp-python", "numpy"),
        "simulated": bool(args.card),
        "fixture": {name: value for name, value in training.items() if name != "curve"},
        "experts_bytes": args.experts,
        "tokens": args.tokens,
        "runs": args.runs,
        "results": [],
    }
    for share in map(float, args.shares.split(",")):
        limit = int(share * args.experts) + rest + PROCESS
        rows = (prefetching if args.guesses else engines)(args, path, limit)
        record["results"] += [{"share": share, "limit_bytes": limit, **row} for row in rows]
        save(args.json, record)
        if args.card:
            break  # the card's size is the share
    print((guesses_table if args.guesses else ssd_table)(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
