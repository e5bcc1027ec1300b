"""Markdown tables of ``moe_cache.py``'s record, and how it stands to what was aimed at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localrt.formatting import format_rate

__all__ = ["tables"]

Record = Mapping[str, Any]

DECODE, PROMPT = 1.4, 1.3  # times static placement
OVER_LRU, BELOW_BELADY = 5.0, 10.0  # points of hit rate


def tables(record: Record) -> str:
    """Hit rates, then decoding and prompts on each CPU."""
    parts = ["\n".join(_hit_rates(record))]
    for cpu in dict.fromkeys(result["cpu"] for result in record["results"]):
        for phase in ("decode", "prompt"):
            rows = [r for r in record["results"] if (r["cpu"], r["phase"]) == (cpu, phase)]
            if rows:
                parts.append("\n".join(_times(rows, cpu, phase)))
    installed = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    parts.append(
        f"`{record['command']}`; {record['card']}, link of {record['link']}, {record['format']}; "
        f"times are simulated. {installed}."
    )
    return "\n\n".join(parts)


def _hit_rates(record: Record) -> Iterator[str]:
    if not record["hit_rates"]:
        return
    names = list(dict.fromkeys(name for row in record["hit_rates"] for name in row["hit_rates"]))
    yield f"| trace | cached | {' | '.join(names)} | best over lru | below belady | aimed at |"
    yield "|---|---|" + "---|" * (len(names) + 3)
    for row in record["hit_rates"]:
        rates = {name: 100 * rate for name, rate in row["hit_rates"].items()}
        scored = max(rates["mrs"], rates["learned"])
        over, below = scored - rates["lru"], rates["belady"] - scored
        already = rates["belady"] - rates["lru"] <= BELOW_BELADY
        met = "lru is near" if already else _met(over >= OVER_LRU and below <= BELOW_BELADY)
        cells = " | ".join(f"{rates[name]:.1f}" if name in rates else "-" for name in names)
        yield (
            f"| {row['trace']} | {100 * row['cached']:.0f} % | {cells} | {over:+.1f} "
            f"| {below:.1f} | {met} |"
        )


def _times(rows: list[Mapping[str, Any]], cpu: str, phase: str) -> Iterator[str]:
    names = list(dict.fromkeys(row["scheduler"] for row in rows))
    aim = DECODE if phase == "decode" else PROMPT
    yield f"Simulated tok/s, {phase}, CPU: {cpu}"
    yield ""
    yield f"| trace | cached | {' | '.join(names)} | best hybrid / static | aimed at {aim} |"
    yield "|---|---|" + "---|" * (len(names) + 2)
    for trace, cached in dict.fromkeys((row["trace"], row["cached"]) for row in rows):
        found = {
            row["scheduler"]: row["tok_s"]
            for row in rows
            if (row["trace"], row["cached"]) == (trace, cached)
        }
        best = max(rate for name, rate in found.items() if name.startswith("hybrid"))
        ratio = best / found["static"]
        cells = " | ".join(format_rate(found[name]) for name in names)
        yield (
            f"| {trace} | {100 * cached:.0f} % | {cells} | {ratio:.2f}x | {_met(ratio >= aim)} |"
        )


def _met(yes: bool) -> str:
    return "met" if yes else "not met"
