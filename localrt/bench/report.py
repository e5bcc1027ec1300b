"""Formats a benchmark's outcome: JSON, a table for people, a trace for Perfetto and Chrome."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from localrt import system
from localrt.bench.gpu import use_line
from localrt.bench.page import gpu_line, shown
from localrt.bench.runner import on_gpu
from localrt.bench.workload import BenchOptions, Outcome, Result, Skipped
from localrt.common.extras import install
from localrt.common.files import write_text
from localrt.common.formatting import format_bytes, format_rate, format_seconds, table
from localrt.common.version import __version__
from localrt.offload.hardware import Machine
from localrt.planning.verdict import meanings

_BASELINE = "llama.cpp"  # the engine of that name, and programs of its own
_PROCESS_ID = 1  # the process in a trace
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
    best = _best(outcome.results)
    return {
        "prompt_tokens": options.workload.prompt_tokens,
        "tokens": options.workload.tokens,
        "runs": 0 if outcome.forecast else options.workload.runs,
        "long_prompt_tokens": options.workload.long_prompt_tokens,
        **{name: getattr(options, name) for name in _OPTIONS},
        "interleaved": outcome.interleaved,
        "interrupted": outcome.interrupted,
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
        **(outcome.forecast or {}),
    }


def to_table(outcome: Outcome, options: BenchOptions, *, name: str, machine: Machine) -> str:
    """Return the run as a table for people."""
    best = _best(outcome.results)
    work = options.workload
    measured = any(result.samples for result in outcome.results)
    runs = f", median of {work.runs}" if measured else ""
    if measured and outcome.interrupted:
        done = sorted({len(result.samples) for result in outcome.results})
        runs = f", interrupted: median of {' or '.join(map(str, done))} of {work.runs} runs"
    heading = (
        f"{name}: {work.prompt_tokens} prompt and {work.tokens} answer tokens{runs}, on"
        f" {machine.cpu.name} with {options.threads or machine.cpu.cores.threads} threads"
    )
    heading = ", ".join([heading, *(gpu_line(asdict(gpu)) for gpu in machine.gpus)])
    devices = {_device(result) for result in outcome.results}
    peers = {_device(result) for result in outcome.results if _is_baseline(result)}
    compare = any(not _is_baseline(r) and _device(r) in peers for r in outcome.results)
    several = {r.engine for r in outcome.results if best[r.engine] is not r}

    def engine(result: Result) -> str:
        return result.engine + (" (simulated)" if result.metrics.get("simulated") else "")

    def setting(result: Result) -> str:
        star = result.engine in several and best[result.engine] is result
        return result.setting + (" *" if star else "")

    columns: list[tuple[str, Callable[[Result], str]]] = [
        ("engine", engine),
        ("setting", setting),
        *([("on", _device)] if len(devices) > 1 else []),
        *_rates(outcome.results, compare=compare),
        *_details(outcome.results, _DETAILS),
        ("TTFT", lambda r: format_seconds(r.metrics["ttft_s"])),
        *_details(outcome.results, {"long_ttft_s": (f"TTFT of {work.long_prompt_tokens}", _time)}),
        ("peak RAM", lambda r: _size(r.metrics["peak_ram_bytes"])),
        *_details(outcome.results, _ON_GPU, measured and "GPU" in devices),
    ]
    headers = [header for header, _ in columns]
    rows = [[cell(result) for _, cell in columns] for result in outcome.results]
    rows += [[skip.engine, _why(skip)] for skip in outcome.skipped]
    heading = f"{outcome.heading}\n\n{heading}" if outcome.heading else heading
    lines = [heading, "", table(rows, headers, "ll".ljust(len(headers), "r"))]
    if several:
        lines.append("* the engine's best setting for this workload")
    if compare:
        where = " on the same device" if len(devices) > 1 else ""
        lines.append(f"/ {_BASELINE}: against its best figure in the column{where}")
    for result in outcome.results:
        if result.metrics.get("helps"):
            lines.append(f"{engine(result)}: {use_line(result.metrics)}")
    if any(result.metrics.get("simulated") for result in outcome.results):
        lines.append("simulated: predicted for a GPU, not measured on one")
    return "\n".join([*lines, *meanings("\n".join(lines))])


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
}
_ON_GPU: _Details = {
    "peak_vram_bytes": ("peak VRAM", _size),
    "joules_per_token": ("energy/token", lambda value: shown(value, "{:.2f} J".format)),
}


def _best(results: Sequence[Result]) -> dict[str, Result]:
    """Return each engine's fastest setting for the whole workload."""
    slowest_first = sorted(results, key=lambda result: result.workload_s, reverse=True)
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


def _why(skip: Skipped) -> str:
    if skip.missing:
        return f"not installed: {install(_EXTRAS[skip.engine])}"
    return f"{skip.setting}: {skip.reason}" if skip.setting else skip.reason


# -- a trace ---------------------------------------------------------------------------------------


def to_chrome(events: Sequence[Mapping[str, Any]], *, process: str) -> dict[str, object]:
    """Convert events ``{"name", "resource", "start_s", "end_s"}`` to the Trace Event Format (in
    microseconds), which Perfetto and Chrome read.

    Time starts at the first event; resources are numbered in the order of first appearance.
    """
    start = min((event["start_s"] for event in events), default=0.0)
    threads: dict[tuple[str, int], int] = {}
    free_at: dict[str, list[float]] = {}  # time from which each line of a resource is free
    complete: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: float(event["start_s"])):
        resource = event["resource"]
        line = _first_free(free_at.setdefault(resource, []), event["start_s"], event["end_s"])
        complete.append(
            {
                "name": event["name"],
                "cat": resource,
                "ph": "X",
                "ts": (event["start_s"] - start) * 1e6,
                "dur": (event["end_s"] - event["start_s"]) * 1e6,
                "pid": _PROCESS_ID,
                "tid": threads.setdefault((resource, line), len(threads) + 1),
            }
        )
    names = [_named("process_name", 0, process)]
    for (resource, line), thread in threads.items():
        names.append(_named("thread_name", thread, f"{resource} {line + 1}" if line else resource))
    return {"traceEvents": names + complete, "displayTimeUnit": "ms"}


def write_trace(path: Path, events: Sequence[Mapping[str, object]], *, process: str) -> None:
    """Write the trace of ``events`` to ``path``, whole or not at all.

    Raises:
        StorageError: the file cannot be written.
    """
    write_text(path, json.dumps(to_chrome(events, process=process)) + "\n")


def _first_free(lines: list[float], start: float, end: float) -> int:
    """Take the first line that is free at ``start``, until ``end``."""
    for line, free in enumerate(lines):
        if free <= start:
            lines[line] = end
            return line
    lines.append(end)
    return len(lines) - 1


def _named(kind: str, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": _PROCESS_ID, "tid": thread, "args": {"name": name}}
