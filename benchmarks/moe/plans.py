"""``localrt plan`` for well-known mixtures, on an 8 GB card with 32 GB of RAM.

    python -m benchmarks.moe.plans [--gpu CARD --gpu-memory 8GB --ram 32GB --ssd 3.5GB/s]

From the published numbers of each model's ``config.json`` alone (``benchmarks/moe/configs``). The
processor is the planner's typical desktop (30 GB/s of memory), so that the results do not depend on
where this runs. All rates are simulated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import save, setting
from benchmarks.moe.tables import plans_table
from localrt.formatting import parse_size
from localrt.offload.placement import Where
from localrt.offload.planner import Budgets, make_plan
from localrt.offload.planner.cards import parse_bandwidth, parse_card
from localrt.offload.planner.config_shapes import shape_from_config
from localrt.offload.planner.machine import typical_machine
from localrt.offload.planner.plan import Plan

MODELS = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "DeepSeek-V3": "deepseek-v3",
}
CTX = 4096
CONFIGS = Path(__file__).parent / "configs"


def _published_config(file: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{file}.json").read_text(encoding="utf-8"))
    return config


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
        "planning_s": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print and keep the results."""
    parser = make_parser(__doc__, results="plans")
    parser.add_argument("--gpu", default="RTX 4060 8GB")
    parser.add_argument("--gpu-memory", default="8GB")
    parser.add_argument("--ram", default="32GB")
    parser.add_argument("--ssd", default="3.5GB/s")
    args = parser.parse_args(arguments)
    card = parse_card(args.gpu)
    machine = replace(
        typical_machine(),
        ssd_bytes_s=parse_bandwidth(args.ssd),
        gpu=card.profile,
        link_bytes_s=card.link_bytes_s,
    )
    budgets = Budgets(ram=parse_size(args.ram), vram=parse_size(args.gpu_memory))
    results: dict[str, Any] = {}
    for name, file in MODELS.items():
        shape, began = shape_from_config(_published_config(file), name=name), time.perf_counter()
        plan = make_plan(shape, machine, budgets, ctx=CTX, advise=True)
        results[name] = result(plan, time.perf_counter() - began)
        print(f"{name}: {results[name]['tok_s']:.3g} tok/s", flush=True)
    record = {
        **setting(cited_command("moe.plans", arguments)),
        "simulated": True,
        "hardware": {
            **{name: getattr(args, name) for name in ("gpu", "gpu_memory", "ram", "ssd")},
            "cpu": machine.name,
            "ram_bytes_s": machine.ram_bytes_s,
            "link_bytes_s": machine.link_bytes_s,
        },
        "ctx": CTX,
        "results": results,
    }
    save(args.json, record)
    print(plans_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
