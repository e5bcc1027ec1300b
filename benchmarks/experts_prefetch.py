"""Whether reading experts ahead of their need pays: each source on, off, and as it is measured.

    .venv/bin/python benchmarks/experts_prefetch.py FOLDER [--experts BYTES] [--shares 0.5,0.25]

The trained fixture, widened as for ``experts_ssd.py``, decodes text that it has not learnt from the
SSD, in a memory control group (root, or a delegated one; ``--no-limit`` gives ``ram=`` instead)
with room for a share of its experts. Every mode has a process of its own; modes alternate, medians
of ``--runs``. ``--simulated`` runs the same with a virtual card, whose seconds are not real.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)


from benchmarks.experts_child import held_out, serve, widened  # noqa: E402
from benchmarks.experts_ssd import PROCESS, PROMPT  # noqa: E402
from localrt.answering.core import Core, open_core  # noqa: E402
from localrt.bench.memory_limit import MemoryLimit  # noqa: E402
from localrt.bench.page_cache import drop_from_cache  # noqa: E402
from localrt.bench.process import ChildProcess  # noqa: E402
from localrt.formatting import format_bytes, format_rate  # noqa: E402
from localrt.loading.parts import LoadOptions  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.offload.experts.prefetch import SOURCES, PrefetchSources  # noqa: E402

RESULTS = ROOT / "benchmarks/results/experts_prefetch.json"
MODES = ("off", *SOURCES, "measured")
TEXTS = 4  # the first warms up
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from benchmarks.experts_prefetch import child; child()"
)


def child() -> None:
    """Serve one parent: load with a mode, then decode what comes."""

    def load(request: dict[str, Any]) -> Core:
        options = LoadOptions(**request["options"])
        core = open_core(request["path"], options, draft="off")
        _choose(core, request["mode"])
        return core

    serve(load, _decode)


def _decoder(core: Core) -> Any:
    engine: Any = core.engine
    return engine._decoder


def _choose(core: Core, mode: str) -> None:
    sources = {
        "off": PrefetchSources(),
        "measured": None,
        **{name: PrefetchSources(**{name: True}) for name in SOURCES},
    }[mode]
    for foresight in _decoder(core).foresights.values():
        foresight.force(sources)


def _decode(core: Core, tokens: Sequence[int]) -> dict[str, Any]:
    """A prompt, then the tokens after it one by one; what these took."""
    session: Any = core.new_session()
    try:
        session.extend(tokens[:PROMPT])
        before, began = session.counts(), time.perf_counter()
        for token in tokens[PROMPT:]:
            session.extend([token])
        seconds, after = time.perf_counter() - began, session.counts()
        if _decoder(core).simulated:
            seconds = after.clock_s - before.clock_s
        count = len(tokens) - PROMPT
        guesses = after.expert_prefetches - before.expert_prefetches
        right = after.expert_prefetch_hits - before.expert_prefetch_hits
        uses = after.expert_uses - before.expert_uses
        return {
            "tok_s": count / seconds,
            "hit_rate": (after.expert_hits - before.expert_hits) / uses if uses else None,
            "read_bytes_per_token": (after.ssd_read_bytes - before.ssd_read_bytes) / count,
            "link_bytes_per_token": (after.link_bytes - before.link_bytes) / count,
            "guesses_per_token": guesses / count,
            "useful": right / guesses if guesses else None,
            "sources": {
                lane: {
                    "on": list(each.sources.names),
                    "measuring_share": each.measuring_share,
                    "judged": {name: asdict(j) for name, j in each.judgements.items()},
                }
                for lane, each in _decoder(core).foresights.items()
            },
        }
    finally:
        session.close()


def measure(
    path: Path, mode: str, limit: int | None, options: Mapping[str, Any], texts: list[list[int]]
) -> dict[str, Any]:
    """One process: the mean of its texts but the first, and what it judged in the end."""
    drop_from_cache([path])
    group = None if limit is None else MemoryLimit.create(limit)
    with ChildProcess([sys.executable, "-c", START, str(ROOT)], group) as running:
        loaded = {"engine": "native", "threads": 2, "ctx": 512, **options}
        running.ask("load", mode=mode, path=str(path), options=loaded)
        rounds = [running.ask("decode", tokens=text) for text in texts][1:]
    found: dict[str, Any] = {"tok_s": statistics.harmonic_mean([r["tok_s"] for r in rounds])}
    for name in rounds[0]:
        if name not in ("tok_s", "sources"):
            values = [each[name] for each in rounds if each[name] is not None]
            found[name] = statistics.fmean(values) if values else None
    return {**found, "sources": rounds[-1]["sources"]}


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run of the median rate, with all rates beside it."""
    ranked = sorted(runs, key=lambda run: float(run["tok_s"]))
    return {**ranked[len(ranked) // 2], "all_tok_s": [run["tok_s"] for run in runs]}


def _said(row: Mapping[str, Any]) -> str:
    parts = [f"{row['mode']}: {format_rate(row['tok_s'])} tok/s"]
    if row["hit_rate"] is not None:
        parts.append(f"{row['hit_rate']:.1%} at hand")
    parts.append(f"{format_bytes(row['read_bytes_per_token'])} read a token")
    if row["useful"] is not None:
        parts.append(f"{row['guesses_per_token']:.1f} guesses a token, {row['useful']:.0%} right")
    on = [f"{lane} {each['on']}" for lane, each in row["sources"].items() if each["on"]]
    return ", ".join(parts + ([f"on: {', '.join(on)}"] if on else []))


def main() -> int:
    """Write the widened file, measure every mode, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=1_500_000_000)
    parser.add_argument("--shares", default="0.5,0.25")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--tokens", type=int, default=192, help="decoded of each text")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-limit", action="store_true", help="no control group, but ram=")
    parser.add_argument(
        "--simulated", metavar="CARD", help="a card like virtual:400MB@12GB/s,256GB/s,20TFLOPS"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    path = widened(args.folder, args.experts)
    size = PROMPT + args.tokens
    texts = held_out(args.folder, TEXTS, size, 2 * size)
    rest = path.stat().st_size - args.experts
    results = []
    for share in map(float, args.shares.split(",")):
        limit = int(share * args.experts) + rest + PROCESS
        options: dict[str, Any] = {"ram": limit} if args.no_limit else {}
        if args.simulated:
            options = {"device": args.simulated}
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes.split(",")}
        for _ in range(args.runs):
            for mode in runs:
                within = None if args.no_limit or args.simulated else limit
                runs[mode].append(measure(path, mode, within, options, texts))
        for mode, found in runs.items():
            row = {"share": share, "limit_bytes": limit, "mode": mode, **_median(found)}
            results.append(row)
            print(f"RAM for {share:.0%} of the experts, {_said(row)}", flush=True)
        if args.simulated:
            break  # the card's size is the share
    record = {
        "machine": hardware.probe().to_dict(),
        "command": f"benchmarks/experts_prefetch.py FIXTURE{_flags(args)}",
        "versions": {package: version(package) for package in ("localrt", "numpy")},
        "simulated": bool(args.simulated),
        "experts_bytes": args.experts,
        "tokens": args.tokens,
        "runs": args.runs,
        "results": results,
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _flags(args: argparse.Namespace) -> str:
    flags = f" --simulated {args.simulated}" if args.simulated else ""
    return flags + (" --no-limit" if args.no_limit else "")


if __name__ == "__main__":
    sys.exit(main())
