"""``localrt plan`` for the mixtures that people ask for, on an 8 GB card with 32 GB of RAM.

    .venv/bin/python benchmarks/plans.py [--gpu CARD --gpu-memory 8GB --ram 32GB --ssd 3.5GB/s]

From the published numbers of each model's ``config.json`` alone (``benchmarks/configs``). The
processor is the planner's typical desktop (30 GB/s of memory), so that the results do not depend on
where this runs; ``--this-machine`` plans with this machine's measured rates. All rates are
simulated. Beside each plan stands what bytes over bandwidths say, by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from localrt.formatting import parse_size  # noqa: E402
from localrt.offload.placement import Where  # noqa: E402
from localrt.offload.planner import Budgets, make_plan  # noqa: E402
from localrt.offload.planner.cards import parse_bandwidth, parse_card  # noqa: E402
from localrt.offload.planner.config_shapes import shape_from_config  # noqa: E402
from localrt.offload.planner.machine import MachineProfile, typical_machine  # noqa: E402
from localrt.offload.planner.plan import Plan  # noqa: E402

CONFIGS = ROOT / "benchmarks/configs"
RESULTS = ROOT / "benchmarks/results/plans.json"
MODELS = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "DeepSeek-V3": "deepseek-v3",
}
CTX = 4096


def by_hand(plan: Plan) -> dict[str, float]:
    """Seconds of a token by bytes over bandwidths, with experts spread evenly over their places.

    ``all_cpu`` is what the CPU alone would take for all active bytes in RAM, ``reading`` what the
    SSD takes for the experts that no memory holds.
    """
    shape, machine = plan.request.shape, plan.request.machine
    experts = [unit for unit in shape.units if unit.kind == "expert"]
    absent = sum(unit.nbytes for unit in experts if plan.placement.where[unit.name].read)
    share = absent / sum(unit.nbytes for unit in experts) if experts else 0.0
    active = sum(unit.nbytes * unit.use for unit in experts)
    return {
        "absent_share": share,
        "reading": share * active / machine.ssd_bytes_s,
        "all_cpu": shape.pass_nbytes / machine.ram_bytes_s,
    }


def result(plan: Plan, seconds: float) -> dict[str, Any]:
    """What the table and a reader need of a plan."""
    shape, prediction = plan.request.shape, plan.prediction
    places = {where.value: 0.0 for where in Where}
    for unit in shape.units:
        places[plan.placement.where[unit.name].value] += unit.nbytes
    return {
        "weight_bytes": shape.nbytes,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "active_bytes": round(shape.pass_nbytes),
        "tok_s": prediction.tok_s,
        "ceiling_tok_s": prediction.ceiling_tok_s,
        "prefill_tok_s": prediction.prefill_tok_s,
        "bottleneck": prediction.bottleneck,
        "bytes_per_token": dict(prediction.nbytes),
        "busy_s": dict(prediction.busy),
        "placed_bytes": places,
        "advice": [asdict(change) for change in plan.changes],
        "notes": list(plan.notes),
        "by_hand": by_hand(plan),
        "planning_s": seconds,
    }


def _machine(args: argparse.Namespace) -> MachineProfile:
    if args.this_machine:
        from localrt.machine.measuring import machine_profile
        from localrt.settings import Settings

        settings = Settings.from_environment()
        _, machine = machine_profile(ROOT, settings, formats={"int4-g32", "mxfp4", "bf16"})
    else:
        machine = typical_machine()
    card = parse_card(args.gpu)
    return replace(
        machine,
        ssd_bytes_s=parse_bandwidth(args.ssd),
        gpu=card.profile,
        link_bytes_s=card.link_bytes_s,
    )


def plan_all(args: argparse.Namespace) -> dict[str, Any]:
    """Every model's plan."""
    machine = _machine(args)
    budgets = Budgets(ram=parse_size(args.ram), vram=parse_size(args.gpu_memory))
    results: dict[str, Any] = {}
    for name, file in MODELS.items():
        config: Mapping[str, Any] = json.loads((CONFIGS / f"{file}.json").read_text())
        began = time.perf_counter()
        plan = make_plan(
            shape_from_config(config, name=name), machine, budgets, ctx=CTX, advise=True
        )
        results[name] = found = result(plan, time.perf_counter() - began)
        best = found["advice"][0] if found["advice"] else None
        helps = "" if best is None else f"; {best['what']}: {best['gain']:.2g}x"
        print(
            f"{name}: {found['tok_s']:.3g} of {found['ceiling_tok_s']:.3g} tok/s, "
            f"{found['bottleneck']}{helps} ({found['planning_s']:.1f} s)",
            flush=True,
        )
    return {
        "command": "benchmarks/plans.py",
        "simulated": True,
        "hardware": {
            "gpu": args.gpu,
            "gpu_memory": args.gpu_memory,
            "ram": args.ram,
            "ssd": args.ssd,
            "cpu": machine.name,
            "ram_bytes_s": machine.ram_bytes_s,
            "link_bytes_s": machine.link_bytes_s,
        },
        "versions": {"localrt": version("localrt")},
        "ctx": CTX,
        "results": results,
    }


def main() -> int:
    """Plan, print and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", default="RTX 4060 8GB")
    parser.add_argument("--gpu-memory", default="8GB")
    parser.add_argument("--ram", default="32GB")
    parser.add_argument("--ssd", default="3.5GB/s")
    parser.add_argument("--this-machine", action="store_true", help="this processor's rates")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.json.write_text(json.dumps(plan_all(args), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
