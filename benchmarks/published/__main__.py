"""Our forecast for each PC whose users published how fast a model is there.

    python -m benchmarks.published [--json FILE]

Nothing runs: forecasts are plans, from figures of the cards' maker and a typical processor. They
are not tuned to the published speeds, which were measured with other engines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import Record, save
from benchmarks.published.tables import published_table
from localrt.common.settings import Settings
from localrt.common.version import __version__
from localrt.planning.published import PUBLISHED, forecast


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
