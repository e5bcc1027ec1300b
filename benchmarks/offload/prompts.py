"""Prompts of models larger than a card, simulated: the real graph of tasks on a virtual RTX 4060.

    python -m benchmarks.offload.prompts [--only MODEL] [--prompt TOKENS]

Nothing is computed and nothing copied (``benchmarks/common/charged.py``): each kernel takes what
the card's figures say, so every number here is simulated. The arithmetic is bf16 with float32 sums,
which cuBLAS does in passes of more than 64 rows; int8 is shown beside it, for kernels to come.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.charged import (
    ChargedCard,
    ChargedClock,
    ChargedOps,
    Charges,
    EmptyStore,
    card_kernels,
    cpu_kernels,
)
from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.random_weights import RandomPackedCheckpoint
from benchmarks.common.record import Record, save, setting
from benchmarks.offload.tables import prompts_table
from localrt.models.decoder import Decoder
from localrt.offload.pipeline.opening import open_pipeline
from localrt.offload.pipeline.setup import Devices
from localrt.offload.placement import Placement, Where
from localrt.offload.planner import Budgets, Plan, PlanRequest, make_plan, shape_from_checkpoint
from localrt.offload.planner.costs import expert_costs
from localrt.offload.planner.machine import GpuProfile, MachineProfile, typical_machine
from localrt.offload.reading.files import ReadMode
from localrt.offload.reading.loading import Reading
from localrt.quant.ops.protocol import Batch

FORMAT = "int4-g32"
RAM = 32_000_000_000
VRAM = round(0.92 * (8 << 30))  # what a desktop leaves of 8 GB
CONTEXT = 8192
LINK_BYTES_S, MEMORY_BYTES_S = 12e9, 272e9  # PCIe 4.0 x8 as pinned copies reach it; the maker's

# An SM of the Ada generation does 512 operations a clock on bf16 with float32 sums and 2048 on
# int8, dense: NVIDIA gives 165.2 TFLOPS and 660.6 TOPS for the RTX 4090's 128 SMs at 2.52 GHz.
_SMS, _CLOCK = 24, 2.46e9  # of the RTX 4060
ARITHMETIC = {"bf16": 512 * _SMS * _CLOCK, "int8": 2048 * _SMS * _CLOCK}  # 30.2 T, 121 T
REACHED = 0.85  # of these, by kernels

_QWEN2 = {
    "vocab_size": 152_064,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen2.5-14B": (
        "Qwen2ForCausalLM",
        {**_QWEN2, "intermediate_size": 13_824, "num_hidden_layers": 48},
    ),
    "Qwen2.5-32B": (
        "Qwen2ForCausalLM",
        {**_QWEN2, "intermediate_size": 27_648, "num_hidden_layers": 64},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        {
            **_QWEN2,
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
}


def machine(arithmetic: str) -> MachineProfile:
    """A desktop with the card."""
    card = GpuProfile(
        name="RTX 4060 8GB, simulated",
        vram_bytes=VRAM,
        bytes_s=MEMORY_BYTES_S,
        flops=REACHED * ARITHMETIC[arithmetic],
    )
    return replace(typical_machine(), gpu=card, link_bytes_s=LINK_BYTES_S)


def plan_of(checkpoint: RandomPackedCheckpoint, profile: MachineProfile) -> Plan:
    """As ``localrt.load`` would place it."""
    return make_plan(
        PlanRequest(
            shape=shape_from_checkpoint(checkpoint),  # type: ignore[arg-type]
            machine=profile,
            budgets=Budgets(ram=RAM, vram=VRAM),
            ctx=CONTEXT,
        )
    )


def run(
    store: EmptyStore, plan: Plan, placement: Placement, prompt: int, keep: int = 0
) -> dict[str, Any]:
    """A token, then a prompt in passes as the engine makes them; seconds of the prompt."""
    profile = plan.request.machine
    assert profile.gpu is not None, "there is a card"
    charges = {"cpu": Charges(), "gpu": Charges()}
    clock = ChargedClock(charges, keep)
    card = ChargedCard(
        clock,
        ChargedOps(card_kernels(profile.gpu), charges["gpu"]),
        name=profile.gpu.name,
        capacity=VRAM,
        link_bytes_s=LINK_BYTES_S,
        memory_bytes_s=profile.gpu.bytes_s,
        flops=profile.gpu.flops,
    )
    devices = Devices(
        ops=ChargedOps(cpu_kernels(profile, FORMAT), charges["cpu"]),
        clock=clock,
        card=card,
        expert_costs=expert_costs(plan.request.costs()),
    )
    like_a_store: Any = store
    mode = ReadMode(direct=False, threads=1, block=1 << 30)
    reading = Reading(mode=mode, files=like_a_store, verify=False)
    decoder = Decoder(
        open_pipeline(like_a_store, store.decoder, placement, devices, reading, budget=1 << 60)
    )
    try:
        cache = decoder.cache(CONTEXT)
        # What a conversation leaves behind: a prompt, and the beginning of an answer.
        for rows in (placement.prefill_rows, 1, 1):
            decoder.forward(Batch.extend([(cache, [1] * rows)]), rows=[rows - 1])
        cache.trim(0)
        before, began = decoder.residency.counts(), clock.now()
        assert before is not None, "a pipeline counts"
        operations = charges["gpu"].operations
        for start in range(0, prompt, placement.prefill_rows):
            rows = min(placement.prefill_rows, prompt - start)
            wanted = [rows - 1] if start + rows == prompt else []
            decoder.forward(Batch.extend([(cache, [1] * rows)]), rows=wanted)
        seconds = clock.now() - began
        after = decoder.residency.counts()
        assert after is not None, "a pipeline counts"
        operations = charges["gpu"].operations - operations
    finally:
        decoder.close()
    return {
        "seconds": seconds,
        "tok_s": prompt / seconds,
        "arithmetic_s": operations / profile.gpu.flops,
        "share_of_arithmetic": operations / profile.gpu.flops / seconds,
        "link_bytes": after.link_bytes - before.link_bytes,
        "busy": {
            name: (after.busy_s.get(name, 0.0) - before.busy_s.get(name, 0.0)) / seconds
            for name in ("gpu", "link", "cpu")
        },
    }


def measure(name: str, prompt: int) -> Record:
    """A model's prompts under its plan, and with the CPU's part left to the CPU."""
    architecture, config = MODELS[name]
    checkpoint = RandomPackedCheckpoint(architecture, config, FORMAT)
    store = EmptyStore(architecture, config, FORMAT, Path())
    results = []
    for arithmetic, peak in ARITHMETIC.items():
        plan = plan_of(checkpoint, machine(arithmetic))
        placement, weights = plan.placement, plan.request.shape.nbytes
        in_ram = sum(
            unit.nbytes
            for unit in plan.request.shape.units
            if unit.use and placement.where[unit.name] is not Where.VRAM
        )
        found = run(store, plan, placement, prompt)
        results.append(
            {
                "arithmetic": arithmetic,
                "peak_ops_s": peak,
                "reached": REACHED,
                "card_bytes_s": MEMORY_BYTES_S,
                "link_bytes_s": LINK_BYTES_S,
                "ctx": CONTEXT,
                "format": FORMAT,
                "prompt_tokens": prompt,
                "pass_rows": placement.prefill_rows,
                "card_rows": placement.card_rows,
                "weight_bytes": weights,
                "share_in_ram": in_ram / weights,
                "forecast_tok_s": plan.prefill_tok_s,
                **found,
            }
        )
        if arithmetic == "bf16":
            by_cpu = replace(placement, card_rows=0, crossing=frozenset())
            results[-1]["tok_s_without_crossing"] = run(store, plan, by_cpu, prompt)["tok_s"]
    return {"name": name, "results": results}


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate every model."""
    parser = make_parser(__doc__, results="prompts")
    parser.add_argument("--only", choices=list(MODELS), help="one model; nothing is saved")
    parser.add_argument("--prompt", type=int, default=2048, metavar="TOKENS")
    args = parser.parse_args(arguments)
    names = list(MODELS) if args.only is None else [args.only]
    rows = [measure(name, args.prompt) for name in names]
    record = {**setting(cited_command("offload.prompts", arguments), "numpy"), "rows": rows}
    if args.only is None:
        save(args.json, record)
    print(prompts_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
