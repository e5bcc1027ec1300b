"""Speeds that users published for PCs with 8 GB GPUs, and our forecast for each.

    python -m benchmarks.published [--json FILE]

Nothing runs: forecasts are plans, from figures of the GPUs' maker and a typical processor. They are
not tuned to the published speeds, which were measured with other engines. What was not named of an
engine or a machine is said.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import Record, markdown_table, save, versions_of
from localrt.common.formatting import format_rate
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.common.version import __version__
from localrt.hub.known_models import find_known
from localrt.offload.planner import Plan, PlanRequest, make_plan
from localrt.offload.planner.gpus import DEFAULT_GPU
from localrt.offload.planner.pc import Hardware, planned_hardware
from localrt.offload.planner.shapes import shape_from_config
from localrt.planning.recommending import sized
from localrt.quant.ops.kv_formats import KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """``tok_s`` of ``model`` (a short name of the table; ``called`` as its users do) on ``pc``, as
    ``--pc`` takes it, by ``source``.

    ``bits`` are those of a weight in ``file``, None where it is as published. ``held`` tokens of
    ``ctx`` were in the cache. What is empty was not named. ``apart`` says why a forecast more than
    a quarter off may be right.
    """

    model: str
    called: str
    tok_s: float
    pc: str = f"{DEFAULT_GPU}, 32GB"
    ram_speed: str | None = None
    engine: str = ""
    source: str = ""
    file: str = "Q4_K_M"
    bits: float | None = 4.9
    ctx: int = DEFAULT_CONTEXT
    held: int | None = None
    kv_format: KvFormat = "bf16"
    apart: str = ""


def _rtx_2080(model: str, called: str, tok_s: float, thread: int, **more: Any) -> Published:
    """An i9-10900X with four channels of DDR4-3200, of which 0.8 is taken to be reached."""
    return Published(
        model=model,
        called=called,
        tok_s=tok_s,
        pc="RTX 2080 8GB, 62GB, 10 cores",
        ram_speed="82GB/s",
        engine="llama.cpp",
        source=f"AlexsJones/llmfit#{thread}",
        **more,
    )


def _a3b(tok_s: float, pc: str, engine: str, **more: Any) -> Published:
    return Published(
        model="qwen3.5:35b", called="35B-A3B", tok_s=tok_s, pc=pc, engine=engine, **more
    )


_IK: dict[str, Any] = {"file": "IQ3_K_R4", "bits": 3.5, "kv_format": "int4"}
_MXFP4: dict[str, Any] = {"file": "MXFP4", "bits": None}

PUBLISHED: tuple[Published, ...] = (
    _rtx_2080("qwen3:4b", "Qwen3-4B", 110.6, 773),
    _rtx_2080("llama3.1:8b", "Llama-3.1-8B", 71.9, 773),
    _rtx_2080("qwen3:8b", "Qwen3-8B", 69.3, 773),
    _rtx_2080("gemma3:12b", "Gemma-3-12B", 26.1, 774),
    _rtx_2080("qwen3:14b", "Qwen3-14B", 16.9, 774),
    _rtx_2080("qwen2.5:14b", "Qwen2.5-14B", 20.8, 778),
    _rtx_2080(
        "mistral-small3.2:24b",
        "Mistral-Small-24B",
        5.2,
        775,
        apart="it had 16 of 40 layers on the GPU; ours are more, and some are copied",
    ),
    _rtx_2080("gpt-oss:20b", "gpt-oss-20b", 36.4, 775, **_MXFP4),
    _rtx_2080("qwen3:30b", "Qwen3-30B-A3B", 36.7, 755),
    Published(
        model="qwen3.5:9b",
        called="Qwen3.5-9B",
        tok_s=56,
        pc="RTX 3070 8GB, 32GB",
        engine="llama.cpp",
        source="localllm.in, 2026",
        ctx=16_384,
    ),
    _a3b(42, "RTX 3060 12GB, 32GB", "llama.cpp", source="thecodacus/llama.cpp#5"),
    Published(
        model="glm-4.7-flash:30b",
        called="GLM-4.7-Flash",
        tok_s=32,
        pc="RTX 3060 12GB, 32GB",
        engine="llama.cpp",
        source="thecodacus/llama.cpp#5",
    ),
    _a3b(57.6, "RTX 4060 Ti 8GB, 32GB", "ik_llama.cpp", ctx=16_384, held=16_384, **_IK),
    _a3b(55.6, "RTX 4060 Ti 8GB, 32GB", "ik_llama.cpp", ctx=163_840, held=163_840, **_IK),
    _a3b(41.6, "RTX 4060 Ti 8GB, 32GB", "llama.cpp", file="Q4_K_S", bits=4.6),
    _a3b(
        45.0,
        "RTX 4060 Laptop 8GB, 48GB",
        "FreeToken's fork",
        source="FlashML-org/FreeToken#179",
        file="IQ3_S",
        bits=3.5,
        apart="a laptop's clocks and the kind of its RAM were not named",
    ),
    Published(
        model="gpt-oss:120b",
        called="gpt-oss-120b",
        tok_s=25.6,
        pc=f"{DEFAULT_GPU}, 96GB",
        apart="neither the GPU of 8 GB nor the kind of RAM was named",
        **_MXFP4,
    ),
    Published(
        model="qwen3.5:27b",
        called="27B",
        tok_s=4.2,
        pc="RTX 5060 Laptop 8GB, 32GB",
        engine="llama.cpp",
        source="sudoingX/qwen38-mtp#45",
        file="IQ4_XS",
        bits=4.3,
        ctx=65_536,
        kv_format="int4",
    ),
)
"""Speeds of decoding a token a pass."""


def rows() -> Iterator[Record]:
    """A row for each published speed."""
    settings = Settings.from_environment()
    for each in PUBLISHED:
        plan = forecast(each, settings)
        yield {
            **asdict(each),
            "forecast_tok_s": round(plan.tok_s, 2),
            "forecast_verdict": str(plan.verdict),
            "weight_bytes": plan.weight_bytes,
        }
        print(f"{each.called}: {each.tok_s} published, {plan.tok_s:.1f} forecast", flush=True)


def forecast(published: Published, settings: Settings) -> Plan:
    """Our plan for the PC of ``published``: what was not named of it is a usual PC's."""
    wanted = Hardware(pc=published.pc, ram_speed=published.ram_speed)
    machine, budgets, _ = planned_hardware(wanted, settings)
    known = find_known(published.model)
    assert known is not None, "it is in the table"
    shape = shape_from_config(
        known.config(), name=known.name, format="int4-g32" if published.bits else None
    )
    if published.bits:
        nbytes = round(known.parameters * 1e9 * published.bits / 8)
        shape = sized(shape, published.file, nbytes)
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets,
        ctx=published.ctx,
        held=published.held,
        kv_format=published.kv_format,
    )
    return make_plan(request)


def published_table(record: Mapping[str, Any]) -> str:
    """Model and file, machine and engine as far as they were named, published and planned speed."""
    lines = [
        [
            f"{row['called']} {row['file']}",
            row["pc"],
            row["engine"] or "not named",
            f"{row['ctx']:,}, {row['kv_format']}",
            format_rate(row["tok_s"]),
            format_rate(row["forecast_tok_s"]),
            row["source"],
        ]
        for row in record["rows"]
    ]
    headers = ["model", "machine", "engine", "context, KV", "published", "forecast", "source"]
    return (
        f"{markdown_table(headers, lines)}\n\n`{record['command']}`, {versions_of(record)}, tok/s; "
        "forecasts are simulated, and nothing was run."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print, save."""
    args = make_parser(__doc__, results="published").parse_args(arguments)
    record: Record = {
        "simulated": True,
        "versions": {"localrt": __version__},
        "command": cited_command("published", arguments),
        "rows": list(rows()),
    }
    save(args.json, record)
    print(published_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
