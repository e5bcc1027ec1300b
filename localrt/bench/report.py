"""Formats a benchmark's outcome: JSON, a table for people.

A page is made of the same table by ``page.py``.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from localrt import system
from localrt.bench.gpu import busy_line
from localrt.bench.runner import on_gpu
from localrt.bench.workload import BenchOptions, Outcome, Result, Skipped
from localrt.common.extras import install
from localrt.common.formatting import format_bytes, format_rate, format_seconds, join_lines, table
from localrt.common.version import __version__
from localrt.offload.hardware import GpuFacts, Machine
from localrt.planning.forecast import meanings

NOT_MEASURED = "not measured"

_BASELINE = "llama.cpp"  # the engine of that name, and programs of its own
_PACKAGES = ("torch", "llama-cpp-python", "numpy")
_EXTRAS = {"native": "torch", "llamacpp": "llamacpp"}
_OPTIONS = ("ram", "gpu_memory", "device", "ctx", "kv_format", "threads")


def facts(machine: Machine) -> dict[str, object]:
    """Return the facts that every report has: ``machine``, ``versions`` and ``command``."""
    versions = {"localrt": __version__}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    # Reports are shared, so they must not reveal the user's folder.
    words = [word.replace(str(Path.home()), "~") for word in sys.argv[1:]]
    command = system.join(["localrt", *words])
    return {"machine": machine.to_dict(), "versions": versions, "command": command}


def to_json(outcome: Outcome, options: BenchOptions) -> dict[str, object]:
    """Return the run as JSON: ``results`` has every engine and setting, the best marked."""
    best = _best(outcome)
    return {
        "prompt_tokens": options.workload.prompt_tokens,
        "tokens": options.workload.tokens,
        "runs": options.workload.runs,
        "long_prompt_tokens": options.workload.long_prompt_tokens,
        **{name: getattr(options, name) for name in _OPTIONS},
        "interleaved": outcome.interleaved,
        "interrupted": outcome.interrupted,
        "busy": outcome.busy,
        "varied": outcome.varied or None,
        "results": [
            {
                "engine": result.engine,
                "setting": result.setting,
                "best": best.get(result.engine) is result,
                **result.metrics,
                "load_s": result.load_s,
                "info": dict(result.info),
                "samples": list(result.samples),
            }
            for result in outcome.results
        ],
        "skipped": [asdict(skip) for skip in outcome.skipped],
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """A run as texts for people: a heading, a table, and notes under it.

    A row that is shorter than ``headers`` ends in the reason why there are no figures.
    """

    heading: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def lay_out(outcome: Outcome, options: BenchOptions, *, name: str, machine: Machine) -> Layout:
    """Return a run's texts. ``options`` are those of a sweep before one of them is varied."""
    best, varied = _best(outcome), outcome.varied
    work, results = options.workload, outcome.results
    devices = {_device(result) for result in results}
    peers = {_device(result) for result in results if _is_baseline(result)}
    both = any(not _is_baseline(r) and _device(r) in peers for r in results)
    compare = both and not outcome.busy  # other programs slow engines unequally
    several = {r.engine for r in results if best.get(r.engine, r) is not r}

    def setting(result: Result) -> str:
        star = result.engine in several and best[result.engine] is result
        streamed = varied == "model" and result.info.get("streamed")
        return result.setting + (" *" if star else ", streamed" if streamed else "")

    names = [("engine", lambda result: result.engine), ("setting", setting)]
    if varied:
        names = [(varied.replace("_", "-"), setting)]
    columns: list[tuple[str, Callable[[Result], str]]] = [
        *names,
        *([("on", _device)] if len(devices) > 1 else []),
        *(_OF_MODELS if varied == "model" else ()),
        *_rates(results, compare=compare),
        *_details(results, _DETAILS),
        ("TTFT", lambda r: format_seconds(r.metrics["ttft_s"])),
        *_details(results, {"long_ttft_s": (f"TTFT of {work.long_prompt_tokens}", _time)}),
        ("peak RAM", lambda r: _size(r.metrics["peak_ram_bytes"])),
        *_details(results, _ON_GPU, "GPU" in devices),
    ]
    rows = [[cell(result) for _, cell in columns] for result in results]
    rows += [_row_of(skip, varied) for skip in outcome.skipped]
    notes = ["* the engine's best setting for this workload"] if several else []
    if compare:
        where = " on the same device" if len(devices) > 1 else ""
        notes.append(f"/ {_BASELINE}: against its best figure in the column{where}")
    if varied == "batch":
        notes.append("batch: answers at a time; decode tok/s is that of all together")
    for result in results:
        if busy := result.metrics.get("busy"):
            notes.append(f"{setting(result) if varied else result.engine}: {busy_line(busy)}")
    heading = _heading(outcome, options, name, machine)
    headers = [header for header, _ in columns]
    said = "\n".join([heading, *headers, *(cell for row in rows for cell in row), *notes])
    notes += meanings(said)
    if outcome.busy:
        notes.append(
            "Measured while busy: other programs use the CPU, so these rates are too low, some by "
            "more than others: engines are not compared."
        )
    return Layout(heading, headers, rows, notes)


def to_table(outcome: Outcome, options: BenchOptions, *, name: str, machine: Machine) -> str:
    """Return the run as a table for people."""
    layout = lay_out(outcome, options, name=name, machine=machine)
    align = ("l" if outcome.varied else "ll").ljust(len(layout.headers), "r")
    rows = table(layout.rows, layout.headers, align).split("\n")
    return join_lines([layout.heading, "", *rows, *layout.notes])


def _heading(outcome: Outcome, options: BenchOptions, name: str, machine: Machine) -> str:
    work, varied = options.workload, outcome.varied
    counts = {"prompt_tokens": f"{work.prompt_tokens} prompt", "tokens": f"{work.tokens} answer"}
    held = " and ".join(text for option, text in counts.items() if option != varied)
    done = sorted({len(result.samples) for result in outcome.results if result.samples})
    runs = f", median of {work.runs}" if done else ""
    if done and outcome.interrupted:
        runs = f", interrupted: median of {' or '.join(map(str, done))} of {work.runs} runs"
    heading = f"{name}: {held} tokens{runs}, on {machine.cpu.name}"
    if varied != "threads":
        heading += f" with {options.threads or machine.cpu.cores.threads} threads"
    return ", ".join([heading, *(gpu_line(gpu) for gpu in machine.gpus)])


def _rates(
    results: Sequence[Result], *, compare: bool
) -> Iterator[tuple[str, Callable[[Result], str]]]:
    """Yield the columns of speeds, each with its ratio to llama.cpp's if they ``compare``."""

    def cell(metric: str, result: Result) -> str:
        return format_rate(result.metrics[metric])

    for name in ("prefill", "decode"):
        yield f"{name} tok/s", partial(cell, f"{name}_tok_s")
        if compare:
            yield f"/ {_BASELINE}", partial(_ratio, results, f"{name}_tok_s")


def _details(
    results: Sequence[Result], details: _Details, always: bool = False
) -> Iterator[tuple[str, Callable[[Result], str]]]:
    """Yield the columns in which any engine has a non-zero value, or ``always`` all."""

    def cell(show: Callable[[Any], str], name: str, result: Result) -> str:
        return show(result.metrics.get(name))

    for name, (header, show) in details.items():
        if always or any(result.metrics.get(name) for result in results):
            yield header, partial(cell, show, name)


def shown(value: float | None, show: Callable[[float], str]) -> str:
    """Return a measured number as text; "not measured" for None."""
    return NOT_MEASURED if value is None else show(value)


def percent(share: float) -> str:
    """``"98 %"``."""
    return f"{100 * share:.0f} %"


def gpu_line(gpu: GpuFacts) -> str:
    """``"NVIDIA GeForce RTX 4060 (8.6 GB of VRAM, driver 580.95)"``."""
    memory = shown(gpu.memory_bytes, format_bytes)
    return f"{gpu.name} ({memory} of VRAM, driver {gpu.driver or 'unknown'})"


_size, _time = (partial(shown, show=show) for show in (format_bytes, format_seconds))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


# Columns shown only if a result has them: header, and format of values.
_Details = Mapping[str, tuple[str, Callable[[Any], str]]]
_DETAILS: _Details = {
    "predicted_tok_s": ("predicted", format_rate),
    "of_predicted": ("of predicted", _percent),
    "pipeline_efficiency": ("pipeline busy", _percent),
    "read_bytes_per_token": ("read/token", _size),
    "expert_hit_rate": ("experts in place", _percent),
}
_ON_GPU: _Details = {
    "peak_vram_bytes": ("peak VRAM", _size),
    "joules_per_token": ("energy/token", lambda value: shown(value, "{:.2f} J".format)),
}


_OF_MODELS: Sequence[tuple[str, Callable[[Result], str]]] = (
    ("size", lambda result: _size(result.info["weight_bytes"])),
    (
        "bits per weight",
        lambda result: f"{8 * result.info['weight_bytes'] / result.info['parameters']:.2f}",
    ),
)


def _best(outcome: Outcome) -> dict[str, Result]:
    """Return each engine's fastest setting for the whole workload; of a sweep there is none."""
    if outcome.varied:
        return {}
    slowest_first = sorted(outcome.results, key=lambda result: result.workload_s, reverse=True)
    return {result.engine: result for result in slowest_first}


def _device(result: Result) -> str:
    """Where an engine computes, be it in part: figures of others are no measure of it."""
    return "GPU" if on_gpu(result.info) else "CPU"


def _is_baseline(result: Result) -> bool:
    return result.engine == "llamacpp" or "peer" in result.info


def _ratio(results: Sequence[Result], metric: str, result: Result) -> str:
    """A figure by llama.cpp's best over all its settings on that device, the fair baseline."""
    same = (r for r in results if _is_baseline(r) and _device(r) == _device(result))
    best = max((r.metrics[metric] for r in same), default=0)
    return f"{result.metrics[metric] / best:.2f}x" if best else "-"


def _row_of(skip: Skipped, varied: str) -> list[str]:
    reason = f"not installed: {install(_EXTRAS[skip.engine])}" if skip.missing else skip.reason
    if varied:
        return [skip.setting, reason]
    return [skip.engine, f"{skip.setting}: {reason}" if skip.setting else reason]
