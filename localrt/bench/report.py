"""A benchmark's outcome as JSON for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from localrt.bench.runner import BenchOptions, Outcome, Result, Skipped
from localrt.formatting import format_bytes, format_rate, format_seconds, table
from localrt.hardware import Machine

__all__ = ["to_json", "to_table"]

_BASELINE = "llamacpp"
_EXTRAS = {"native": "torch", "llamacpp": "'localrt[llamacpp]'", "transformers": "'localrt[bench]'"}


def to_json(
    outcome: Outcome,
    options: BenchOptions,
    *,
    name: str,
    machine: Machine,
    versions: Mapping[str, str],
    command: str,
) -> dict[str, Any]:
    """The whole run: ``results`` has one entry per engine and setting, the best ones flagged."""
    best = _best(outcome.results)
    return {
        "machine": machine.to_dict(),
        "versions": dict(versions),
        "command": command,
        "model": name,
        "prompt_tokens": options.workload.prompt_tokens,
        "tokens": options.workload.tokens,
        "runs": options.workload.runs,
        "memory_limit": options.memory_limit,
        "interleaved": outcome.interleaved,
        "results": [
            {
                "engine": result.engine,
                "setting": result.setting,
                "best": best[result.engine] is result,
                **result.metrics,
                "load_s": result.load_s,
                "info": dict(result.info),
                "samples": list(result.samples),
            }
            for result in outcome.results
        ],
        "skipped": [asdict(skip) for skip in outcome.skipped],
    }


def to_table(outcome: Outcome, options: BenchOptions, *, name: str, machine: Machine) -> str:
    """What the same run says to a person."""
    best = _best(outcome.results)
    work = options.workload
    limit = f", at most {format_bytes(options.memory_limit)}" if options.memory_limit else ""
    heading = (
        f"{name}: {work.prompt_tokens} prompt and {work.tokens} answer tokens, median of"
        f" {work.runs}, on {machine.cpu.name} with {machine.cpu.usable_cores} threads{limit}"
    )
    headers = ["engine", "setting", "prefill tok/s", "decode tok/s", "TTFT", "peak RAM"]
    prefill = _baseline(outcome.results, "prefill_tok_s")
    decode = _baseline(outcome.results, "decode_tok_s")
    compare = prefill is not None and any(r.engine != _BASELINE for r in outcome.results)
    if compare:
        headers.insert(3, f"/ {_BASELINE}")
        headers.insert(5, f"/ {_BASELINE}")
    several = {r.engine for r in outcome.results if best[r.engine] is not r}
    rows: list[list[str]] = []
    for result in outcome.results:
        metrics = result.metrics
        star = " *" if result.engine in several and best[result.engine] is result else ""
        row = [
            result.engine,
            result.setting + star,
            format_rate(metrics["prefill_tok_s"]),
            format_rate(metrics["decode_tok_s"]),
            format_seconds(metrics["ttft_s"]),
            "-" if metrics["peak_ram_bytes"] is None else format_bytes(metrics["peak_ram_bytes"]),
        ]
        if compare:
            row.insert(3, _ratio(metrics["prefill_tok_s"], prefill))
            row.insert(5, _ratio(metrics["decode_tok_s"], decode))
        rows.append(row)
    rows += [[skip.engine, _why(skip)] for skip in outcome.skipped]
    lines = [heading, "", table(rows, headers, "ll".ljust(len(headers), "r"))]
    if several:
        lines.append("* the engine's best setting for this workload")
    if compare:
        lines.append(f"/ {_BASELINE}: against its best figure in the column")
    return "\n".join(lines)


def _best(results: Sequence[Result]) -> dict[str, Result]:
    """Each engine's fastest setting for the whole workload."""
    best: dict[str, Result] = {}
    for result in results:
        known = best.get(result.engine)
        if known is None or result.workload_s < known.workload_s:
            best[result.engine] = result
    return best


def _baseline(results: Sequence[Result], metric: str) -> float | None:
    """llama.cpp's best figure over its settings: nobody beats it by its worse choice."""
    return max((r.metrics[metric] for r in results if r.engine == _BASELINE), default=None)


def _ratio(value: float, baseline: float | None) -> str:
    return f"{value / baseline:.2f}x" if baseline else "-"


def _why(skip: Skipped) -> str:
    if skip.missing:
        return f"not installed: pip install {_EXTRAS[skip.engine]}"
    return f"{skip.setting}: {skip.reason}" if skip.setting else skip.reason
