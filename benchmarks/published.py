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
from localrt.hub.known_models import KnownModel, find_known
from localrt.offload.planner import Plan, PlanRequest, make_plan
from localrt.offload.planner.gpus import DEFAULT_GPU
from localrt.offload.planner.pc import Hardware, planned_hardware
from localrt.offload.planner.shapes import shape_from_config
from localrt.planning.recommending import sized
from localrt.quant.ops.kv_formats import KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """``tok_s`` of ``model`` (a short name of the table; ``called`` as its users do) on ``gpu``.

    ``bits`` are those of a weight in ``file``, None where it is as published. ``ctx`` tokens were
    held. What is empty was not named; ``ram`` is then taken to be 32 GB.
    """

    model: str
    called: str
    tok_s: float
    gpu: str = ""
    engine: str = ""
    file: str = ""
    bits: float | None = 4.9
    ctx: int | None = None
    kv_format: KvFormat = "bf16"
    kv: str = ""
    ram: str = ""
    also: str = ""

    @property
    def pc(self) -> str:
        """The PC, as ``parse_pc`` reads it."""
        return f"{self.gpu or DEFAULT_GPU}, {self.ram or '32GB'} DDR5-5600, 8 cores, NVMe"

    @property
    def known(self) -> KnownModel:
        """The model of the table."""
        found = find_known(self.model)
        assert found is not None, "it is in the table"
        return found


def _a3b(tok_s: float, engine: str, gpu: str = "RTX 4060 Ti 8GB", **more: Any) -> Published:
    return Published(
        model="qwen3.5:35b", called="35B-A3B", gpu=gpu, engine=engine, tok_s=tok_s, **more
    )


_IK: dict[str, Any] = {"file": "IQ3_K_R4", "bits": 3.5, "kv_format": "int4", "kv": "q4_0"}

PUBLISHED: tuple[Published, ...] = (
    _a3b(57.6, "ik_llama.cpp", ctx=16_384, **_IK),
    _a3b(55.6, "ik_llama.cpp", ctx=163_840, **_IK),
    _a3b(41.6, "llama.cpp", file="Q4_K_S", bits=4.6),
    _a3b(45.0, "FreeToken's fork", "RTX 4060 Laptop 8GB"),
    Published(model="gpt-oss:20b", called="gpt-oss-20b", bits=None, tok_s=36.4),
    Published(
        model="gpt-oss:120b",
        called="gpt-oss-120b",
        bits=None,
        ram="96GB",
        tok_s=25.6,
        also="prompts at 134 tok/s",
    ),
    Published(
        model="qwen3.5:27b",
        called="27B",
        gpu="RTX 5060 Laptop 8GB",
        file="IQ4_XS",
        bits=4.3,
        tok_s=4.2,
        also="7.3 tok/s with its MTP block",
    ),
    Published(model="mistral-small3.2:24b", called="24B", tok_s=5.2),
    Published(model="qwen3:14b", called="14B", tok_s=20.8),
)
"""Speeds of decoding a token a pass, where nothing else is said."""


def rows() -> Iterator[Record]:
    """A row for each published speed."""
    settings = Settings.from_environment()
    for each in PUBLISHED:
        plan = forecast(each, settings)
        yield {
            **asdict(each),
            "pc": each.pc,
            "forecast_tok_s": round(plan.tok_s, 2),
            "forecast_verdict": str(plan.verdict),
            "weight_bytes": plan.weight_bytes,
        }
        print(f"{each.called}: {each.tok_s} published, {plan.tok_s:.1f} forecast", flush=True)


def forecast(published: Published, settings: Settings) -> Plan:
    """Our plan for the PC of ``published``: what was not named of it is a usual PC's."""
    machine, budgets, _ = planned_hardware(Hardware(pc=published.pc), settings)
    known, ctx = published.known, published.ctx or DEFAULT_CONTEXT
    shape = shape_from_config(
        known.config(), name=known.name, format="int4-g32" if published.bits else None
    )
    if published.bits:
        nbytes = round(known.parameters * 1e9 * published.bits / 8)
        shape = sized(shape, published.file or "Q4_K_M", nbytes)
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets,
        ctx=ctx,
        held=published.ctx,
        kv_format=published.kv_format,
    )
    return make_plan(request)


def published_table(record: Mapping[str, Any]) -> str:
    """Model and file, machine and engine as far as they were named, published and planned speed."""
    lines = [
        [
            f"{row['called']} {row['file']}".rstrip(),
            _machine(row),
            row["engine"] or "not named",
            f"{row['ctx']:,}, {row['kv']}" if row["ctx"] else "not named",
            " ".join(filter(None, (format_rate(row["tok_s"]), _beside(row)))),
            format_rate(row["forecast_tok_s"]),
        ]
        for row in record["rows"]
    ]
    headers = ["model", "machine", "engine", "context, KV", "tok/s published", "tok/s forecast"]
    return (
        f"{markdown_table(headers, lines)}\n\n`{record['command']}`, {versions_of(record)}; "
        "forecasts are simulated, and nothing was run."
    )


def _machine(row: Mapping[str, Any]) -> str:
    gpu = row["gpu"] or "a GPU of 8 GB"
    return f"{gpu}, {row['ram']} of RAM" if row["ram"] else gpu


def _beside(row: Mapping[str, Any]) -> str:
    return f"({row['also']})" if row["also"] else ""


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
