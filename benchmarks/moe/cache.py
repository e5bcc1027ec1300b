"""Expert caches and schedulers on routing traces: hit rates beside the optimum, simulated times.

    python -m benchmarks.moe.cache [TRACE ...] [--synthetic NAME,...] [--cache 0.25,0.5]

Every policy replays every trace from an empty cache, each miss being brought in; beside it are
Belady's optimum, which knows the future, and for synthetic traces a policy that knows the odds.
Then passes are simulated, decoding and prompts, on a card of the 8 GB class over a 12 GB/s link,
whatever of the model fits it: ``--cache`` is the share of the experts that it holds. The CPU's
rates are those measured on this machine (``--cpu this``), a desktop's (``typical``), or those of an
earlier record (``--profile``). Traces are those that ``benchmarks.moe.record_trace`` wrote, and
synthetic ones with published skew. Nothing is run: times are simulated, and marked so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.command import ROOT, cited_command, make_parser
from benchmarks.common.record import Record, save, setting
from benchmarks.moe.belady import belady, replay
from benchmarks.moe.cache_tables import cache_tables
from benchmarks.moe.costs import CONFIGS, layer_costs
from benchmarks.moe.policies import POLICIES, Informed
from benchmarks.moe.routing_trace import RoutingTrace, TraceHeader
from benchmarks.moe.schedulers import SCHEDULERS, Outcome, simulate
from benchmarks.moe.synthetic import PRESETS, find_preset, synthetic_odds, synthetic_trace
from localrt.errors import LocalrtError, OptionError
from localrt.machine.measuring import machine_profile
from localrt.offload.experts.cache import ExpertCache
from localrt.offload.planner.cards import parse_bandwidth, parse_card
from localrt.offload.planner.machine import MachineProfile, typical_machine
from localrt.settings import Settings

FORMAT = "int4-g32"
PROMPT = 512
PROMPTS = 2
HELD = 1024  # tokens before a decoded one


@dataclass(frozen=True, slots=True)
class Case:
    """A trace: its decoding, and its prompts apart. ``shape`` is of the layers that are timed."""

    name: str
    shape: str
    decode: RoutingTrace
    prompts: Sequence[RoutingTrace]
    source: str
    odds: NDArray[np.float32] | None = None

    @property
    def header(self) -> TraceHeader:
        """Of the model."""
        return self.decode.header


def recorded(path: Path, shape: str) -> Case:
    """The trace in a file."""
    trace = RoutingTrace.load(path)
    prompts = only(trace, range(16, 1 << 20))
    parts = [prompts.part(n, n + 1) for n in range(len(prompts.passes()))]
    return Case(path.name, shape, only(trace, range(1, 2)), parts, "recorded")


def synthetic(name: str, shape: str, tokens: int) -> Case:
    """A preset's."""
    source = find_preset(name).source
    seeds = range(1, PROMPTS + 1)
    return Case(
        f"{name} (synthetic)",
        name if name in CONFIGS else shape,
        synthetic_trace(name, tokens=tokens),
        [synthetic_trace(name, prompt=PROMPT, tokens=0, seed=seed) for seed in seeds],
        source,
        synthetic_odds(name, tokens=tokens),
    )


def only(trace: RoutingTrace, rows: range) -> RoutingTrace:
    """The passes with so many rows."""
    kept = np.zeros(trace.tokens, np.bool_)
    for tokens in trace.passes():
        kept[tokens] = tokens.stop - tokens.start in rows
    return RoutingTrace(trace.header, trace.experts[kept], trace.scores[kept], trace.pass_of[kept])


def slots_of(header: TraceHeader, share: float) -> int:
    """How many experts a share of the model's are."""
    return max(1, round(share * header.layers * header.count))


def hit_rates(case: Case, shares: Sequence[float]) -> list[dict[str, Any]]:
    """Every policy, the bound that the odds give, and the optimum."""
    trace, rows = case.decode, []
    sizes = (trace.header.layers, trace.header.count, trace.header.used)
    for share in shares:
        slots = slots_of(trace.header, share)
        policies = {name: make(*sizes) for name, make in POLICIES.items()}
        if case.odds is not None:
            policies["informed"] = Informed(case.odds)
        rates = {
            name: replay(trace, ExpertCache(*sizes, slots, policy=policy)).hit_rate
            for name, policy in policies.items()
        }
        rates["belady"] = belady(trace, slots).hit_rate
        row = {"trace": case.name, "cached": share, "slots": slots, "tokens": trace.tokens}
        rows.append(row | {"hit_rates": rates})
    return rows


def times(
    case: Case, phase: str, machine: MachineProfile, shares: Sequence[float]
) -> list[dict[str, Any]]:
    """Every scheduler. Decoding is measured over the second half; prompts one by one."""
    results = []
    traces = case.prompts if phase == "prompt" else [case.decode]
    for share in shares:
        for scheduler, rule in SCHEDULERS.items():
            total = Outcome()
            for trace in traces:
                many = trace.tokens if phase == "prompt" else 1
                held = 0 if phase == "prompt" else HELD
                half = len(trace.passes()) // 2
                total.add(
                    simulate(
                        rule,
                        trace,
                        layer_costs(case.shape, machine, rows=many, held=held, format=FORMAT),
                        slots=slots_of(trace.header, share),
                        known=trace.part(0, max(1, half)),
                        warm_up=half,
                    )
                )
            results.append(
                {
                    "simulated": True,
                    "trace": case.name,
                    "shape": case.shape,
                    "cpu": machine.name,
                    "phase": phase,
                    "cached": share,
                    "scheduler": scheduler,
                    "seconds_per_pass": total.seconds / total.passes,
                    "tok_s": total.rows / total.seconds,
                    "hit_rate": total.hit_rate,
                    "copies_per_pass": total.copies / total.passes,
                    "busy_shares": {k: v / total.seconds for k, v in total.busy.items()},
                }
            )
    return results


def machines(args: argparse.Namespace) -> list[MachineProfile]:
    """The CPUs asked for, each with the card and its link."""
    card, link = parse_card(args.card), parse_bandwidth(args.link)
    found = [_machine(name, args.profile) for name in args.cpu.split(",")]
    return [replace(machine, gpu=card.profile, link_bytes_s=link) for machine in found]


def _machine(name: str, profile: Path | None) -> MachineProfile:
    if name == "typical":
        return typical_machine()
    if name != "this":
        raise OptionError(f"--cpu {name!r} is not known: this, typical or both")
    if profile is None:
        return machine_profile(ROOT, Settings.from_environment(), formats=[FORMAT])[1]
    try:
        record = json.loads(profile.read_text(encoding="utf-8"))
        return MachineProfile.from_dict(record["profile"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{profile} is no record with a profile") from error


def run(args: argparse.Namespace, command: str) -> Record:
    """Everything, as it is written down."""
    shares = [float(share) for share in args.cache.split(",")]
    if not all(0 < share <= 1 for share in shares):
        raise OptionError(f"--cache {args.cache}: shares must be above 0 and at most 1")
    names = args.synthetic.split(",") if args.synthetic else [] if args.traces else list(PRESETS)
    profiles = machines(args)
    cases = [recorded(path, args.shape) for path in args.traces]
    cases += [synthetic(name, args.shape, args.tokens) for name in names]
    rates: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for case in cases:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        decodes = len(case.decode.passes()) >= 2
        rates += hit_rates(case, shares) if decodes else []
        for machine in profiles:
            results += times(case, "decode", machine, shares) if decodes else []
            results += times(case, "prompt", machine, shares) if case.prompts else []
    return {
        **setting(command, "numpy", "scipy"),
        "simulated": True,
        "card": args.card,
        "link": args.link,
        "format": FORMAT,
        "profile": next((p.to_dict() for p in profiles), None),
        "traces": [
            {"trace": case.name, "shape": case.shape, **asdict(case.header), "source": case.source}
            for case in cases
        ],
        "hit_rates": rates,
        "results": results,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, simulate, save, print."""
    parser = make_parser(__doc__, results="moe_cache")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--synthetic", help=f"of {', '.join(PRESETS)} (default: all, if no TRACE)")
    parser.add_argument("--cache", default="0.25,0.5", help="shares of the experts held")
    parser.add_argument("--tokens", type=int, default=400, help="of a synthetic trace")
    parser.add_argument("--shape", default="qwen3-30b", choices=CONFIGS, help="of a TRACE's layers")
    parser.add_argument("--card", default="RTX 4060 8GB")
    parser.add_argument("--link", default="12GB/s")
    parser.add_argument("--cpu", default="this,typical")
    parser.add_argument("--profile", type=Path, help="take --cpu this from an earlier record")
    args = parser.parse_args(arguments)
    try:
        record = run(args, cited_command("moe.cache", arguments))
    except LocalrtError as error:
        print(f"moe.cache: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    save(args.json, record)
    print(cache_tables(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
