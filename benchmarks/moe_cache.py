"""Expert caches and schedulers on routing traces: hit rates beside the optimum, simulated times.

    .venv/bin/python benchmarks/moe_cache.py [TRACE ...] [--synthetic NAME,...] [--cache 0.25,0.5]

Every policy replays every trace from an empty cache, each miss being brought in; beside it are
Belady's optimum, which knows the future, and for synthetic traces a policy that knows the odds.
Then passes are simulated, decoding and prompts, on a card of the 8 GB class over a 12 GB/s link,
whatever of the model fits it: ``--cache`` is the share of the experts that it holds. The CPU's
rates are those measured on this machine (``--cpu this``), a desktop's (``typical``), or those of an
earlier record (``--profile``). Traces are those that ``bench --expert-trace`` wrote, and synthetic
ones with published skew. Nothing is run: times are simulated, and marked so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(ROOT)]

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from benchmarks.moe_cache_costs import CONFIGS, layer_costs  # noqa: E402
from benchmarks.moe_cache_tables import tables  # noqa: E402
from benchmarks.moe_cache_time import SCHEDULERS, simulate  # noqa: E402
from localrt.errors import LocalrtError, OptionError  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.machine.measuring import machine_profile  # noqa: E402
from localrt.offload.experts.belady import belady  # noqa: E402
from localrt.offload.experts.cache import ExpertCache  # noqa: E402
from localrt.offload.experts.policies import POLICIES, Policy  # noqa: E402
from localrt.offload.experts.replay import replay  # noqa: E402
from localrt.offload.experts.synthetic import (  # noqa: E402
    PRESETS,
    find_preset,
    synthetic_odds,
    synthetic_trace,
)
from localrt.offload.experts.trace import RoutingTrace  # noqa: E402
from localrt.offload.planner.cards import parse_bandwidth, parse_card  # noqa: E402
from localrt.offload.planner.machine import MachineProfile, typical_machine  # noqa: E402
from localrt.settings import Settings  # noqa: E402

FORMAT = "int4-g32"
PROMPT = 512
PROMPTS = 2
HELD = 1024  # tokens before a decoded one


def only(trace: RoutingTrace, rows: range) -> RoutingTrace:
    """The passes with so many rows."""
    kept = np.zeros(trace.tokens, np.bool_)
    for tokens in trace.passes():
        kept[tokens] = tokens.stop - tokens.start in rows
    return RoutingTrace(trace.header, trace.experts[kept], trace.scores[kept], trace.pass_of[kept])


class Informed:
    """Knows how a synthetic trace was made, all but the dice: about what policies can reach."""

    def __init__(self, odds: NDArray[np.float32]) -> None:
        self.value = np.zeros(odds.shape[1:])
        self._odds = odds
        self._token = -1

    def touch(self, layer: int, *_: Any) -> None:
        self._token += layer == 0
        self.value[layer] = self._odds[self._token, layer]


def hit_rates(
    name: str,
    trace: RoutingTrace,
    shares: Sequence[float],
    odds: NDArray[np.float32] | None = None,
) -> list[dict[str, Any]]:
    """Every policy, the bound that ``odds`` give, and the optimum."""
    header, rows = trace.header, []
    for share in shares:
        slots = max(1, round(share * header.layers * header.count))
        rates = {}
        for policy in POLICIES:
            cache = ExpertCache(header.layers, header.count, header.used, slots, policy=policy)
            rates[policy] = replay(trace, cache).hit_rate
        if odds is not None:
            informed: Policy = Informed(odds)
            cache = ExpertCache(header.layers, header.count, header.used, slots, policy=informed)
            rates["informed"] = replay(trace, cache).hit_rate
        rates["belady"] = belady(trace, slots).hit_rate
        row = {"trace": name, "cached": share, "slots": slots, "tokens": trace.tokens}
        rows.append(row | {"hit_rates": rates})
    return rows


def times(
    name: str,
    shape: str,
    phase: str,
    traces: Sequence[RoutingTrace],
    machine: MachineProfile,
    shares: Sequence[float],
) -> list[dict[str, Any]]:
    """Every scheduler. Decoding is measured over the second half; prompts one by one."""
    results = []
    for share in shares:
        for scheduler, rule in SCHEDULERS.items():
            seconds = hits = demands = copies = passes = rows = 0.0
            busy = {"cpu": 0.0, "gpu": 0.0, "link": 0.0}
            for trace in traces:
                header = trace.header
                many = trace.tokens if phase == "prompt" else 1
                costs = layer_costs(
                    shape, machine, rows=many, held=0 if many > 1 else HELD, format=FORMAT
                )
                half = len(trace.passes()) // 2
                outcome = simulate(
                    rule,
                    trace,
                    costs,
                    slots=max(1, round(share * header.layers * header.count)),
                    known=trace.part(0, max(1, half)),
                    warm_up=half,
                )
                seconds, passes = seconds + outcome.seconds, passes + outcome.passes
                hits, demands = hits + outcome.hits, demands + outcome.demands
                copies, rows = copies + outcome.copies, rows + outcome.rows
                busy = {key: busy[key] + outcome.busy[key] for key in busy}
            results.append(
                {
                    "simulated": True,
                    "trace": name,
                    "shape": shape,
                    "cpu": machine.name,
                    "phase": phase,
                    "cached": share,
                    "scheduler": scheduler,
                    "seconds_per_pass": seconds / passes,
                    "tok_s": rows / seconds,
                    "hit_rate": hits / demands,
                    "copies_per_pass": copies / passes,
                    "busy_shares": {key: value / seconds for key, value in busy.items()},
                }
            )
    return results


def machines(args: argparse.Namespace) -> list[MachineProfile]:
    """The CPUs asked for, each with the card and its link."""
    card = parse_card(args.card)
    found = []
    for name in args.cpu.split(","):
        if args.profile is not None and name == "this":
            try:
                record = json.loads(args.profile.read_text(encoding="utf-8"))
                machine = MachineProfile.from_dict(record["profile"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise OptionError(f"{args.profile} is no record with a profile") from error
        elif name == "this":
            machine = machine_profile(ROOT, Settings.from_environment(), formats=[FORMAT])[1]
        elif name == "typical":
            machine = typical_machine()
        else:
            raise OptionError(f"--cpu {name!r} is not known: this, typical or both")
        link = parse_bandwidth(args.link)
        found.append(replace(machine, gpu=card.profile, link_bytes_s=link))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="expert caches and schedulers on routing traces")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--synthetic", help=f"of {', '.join(PRESETS)} (default: all, if no TRACE)")
    parser.add_argument("--cache", default="0.25,0.5", help="shares of the experts held")
    parser.add_argument("--tokens", type=int, default=400, help="of a synthetic trace")
    parser.add_argument("--shape", default="qwen3-30b", choices=CONFIGS, help="of a TRACE's layers")
    parser.add_argument("--card", default="RTX 4060 8GB")
    parser.add_argument("--link", default="12GB/s")
    parser.add_argument("--cpu", default="this,typical")
    parser.add_argument("--profile", type=Path, help="take --cpu this from an earlier record")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/moe_cache.json")
    args = parser.parse_args()
    try:
        record = run(args)
    except LocalrtError as error:
        print(f"moe_cache: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(tables(record))
    return 0


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Everything, as it is written down."""
    shares = [float(share) for share in args.cache.split(",")]
    if not all(0 < share <= 1 for share in shares):
        raise OptionError(f"--cache {args.cache}: shares must be above 0 and at most 1")
    names = args.synthetic.split(",") if args.synthetic else [] if args.traces else list(PRESETS)
    profiles = machines(args)
    cases = []
    for path in args.traces:
        trace = RoutingTrace.load(path)
        prompts = only(trace, range(16, 1 << 20))
        parts = [prompts.part(n, n + 1) for n in range(len(prompts.passes()))]
        cases.append((path.name, args.shape, only(trace, range(1, 2)), parts, trace.header))
    for name in names:
        find_preset(name)
        trace = synthetic_trace(name, tokens=args.tokens)
        prompts_of = [
            synthetic_trace(name, prompt=PROMPT, tokens=0, seed=1 + n) for n in range(PROMPTS)
        ]
        shape = name if name in CONFIGS else args.shape
        cases.append((f"{name} (synthetic)", shape, trace, prompts_of, trace.header))
    rates: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for name, shape, decode, prompts_of, _ in cases:
        print(f"{name} ...", file=sys.stderr, flush=True)
        if len(decode.passes()) >= 2:
            odds = None
            if "(synthetic)" in name:
                odds = synthetic_odds(name.split()[0], tokens=args.tokens)
            rates += hit_rates(name, decode, shares, odds)
        for machine in profiles:
            if len(decode.passes()) >= 2:
                results += times(name, shape, "decode", [decode], machine, shares)
            if prompts_of:
                results += times(name, shape, "prompt", prompts_of, machine, shares)
    return {
        "machine": hardware.probe().to_dict(),
        "versions": {
            "python": sys.version.split()[0],
            **{name: version(name) for name in ("localrt", "numpy", "scipy")},
        },
        "command": " ".join(["benchmarks/moe_cache.py", *_shown(sys.argv[1:])]),
        "simulated": True,
        "card": args.card,
        "link": args.link,
        "format": FORMAT,
        "profile": next((p.to_dict() for p in profiles), None),
        "traces": [
            {
                "trace": name,
                "shape": shape,
                "layers": header.layers,
                "experts": f"{header.used} of {header.count}",
                "fingerprint": header.fingerprint,
                "source": PRESETS[name.split()[0]].source if "(synthetic)" in name else "recorded",
            }
            for name, shape, _, _, header in cases
        ],
        "hit_rates": rates,
        "results": results,
    }


def _shown(arguments: Sequence[str]) -> list[str]:
    """Without folders: those are this machine's."""
    return [Path(a).name if "/" in a and not a.endswith("/s") else a for a in arguments]


if __name__ == "__main__":
    sys.exit(main())
