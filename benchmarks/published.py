"""Our forecast for each PC whose users published how fast a model is there.

    python -m benchmarks.published [--json FILE]

Nothing runs: forecasts are plans, from figures of the GPUs' maker and a typical processor. They
are not tuned to the published speeds, which were measured with other engines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import Record, markdown_table, save, versions_of
from localrt.common.formatting import format_rate
from localrt.common.settings import Settings
from localrt.common.version import __version__
from localrt.offload.planner import Plan, PlanRequest, make_plan
from localrt.offload.planner.config_shapes import shape_from_config
from localrt.planning.inputs import Hardware, known_hardware
from localrt.planning.published import PUBLISHED, Published
from localrt.planning.recommending import sized


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
    card = row["card"] or "a GPU of 8 GB"
    return f"{card}, {row['ram']} of RAM" if row["ram"] else card


def _beside(row: Mapping[str, Any]) -> str:
    return f"({row['also']})" if row["also"] else ""


_CTX = 4096


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
        print(f"{each}; forecast {plan.tok_s:.1f} tok/s", flush=True)


def forecast(published: Published, settings: Settings) -> Plan:
    """Our plan for the PC of ``published``: what was not named of it is a usual PC's."""
    machine, budgets = known_hardware(settings, Hardware(pc=published.pc))
    known, ctx = published.known, published.ctx or _CTX
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
