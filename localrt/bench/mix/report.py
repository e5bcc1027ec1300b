"""Formats the outcome of a mix: one JSON object, and a table for people.

Figures are medians over a server's runs; ``events`` and ``samples`` are from all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from localrt.bench.mix.mix import App, Mix, percentiles
from localrt.bench.mix.runner import MixOutcome, MixRun, Outcome
from localrt.bench.report import NOT_MEASURED, facts, percent, shown
from localrt.common.formatting import format_bytes, format_rate, format_seconds, join_lines, table
from localrt.offload.hardware import Machine


def to_json(outcome: MixOutcome, mix: Mix, machine: Machine) -> dict[str, object]:
    """Return the outcome as JSON; figures that could not be measured are None."""
    return {
        "kind": "mix",
        **facts(machine),
        "mix": _mix(mix),
        "servers": [
            _server(name, mix, runs, machine.cpu.usable_cores)
            for name, runs in outcome.runs.items()
        ],
        "skipped": [{"server": name, "reason": why} for name, why in outcome.skipped.items()],
        "interrupted": outcome.interrupted,
    }


def _mix(mix: Mix) -> dict[str, object]:
    """Return the mix under its file's keys."""
    apps = [asdict(app) for app in mix.apps]
    for app in apps:
        app["class"] = app.pop("class_")
    rest = [asdict(each) for each in mix.neighbours]
    named = {"name": mix.name, "seconds": mix.seconds, "seed": mix.seed}
    return {**named, "apps": apps, "neighbours": rest}


def _server(name: str, mix: Mix, runs: Sequence[MixRun], cores: int) -> dict[str, object]:
    return {
        "server": name,
        "settings": {"commands": runs[0].commands},
        "runs": len(runs),
        "apps": [
            {
                "app": app.name,
                "class": app.class_,
                "kind": app.kind,
                "model": app.model,
                "goals": asdict(app.goals),
                **_medians([_app(app, run) for run in runs]),
                "events": [
                    {"run": number, **_event(event)}
                    for number, run in enumerate(runs, 1)
                    for event in sorted(run.events, key=lambda one: one.at_s)
                    if event.app == app.name
                ],
            }
            for app in mix.apps
        ],
        **_medians([_whole(run, cores) for run in runs]),
        "joules_of": runs[0].samples.counters,
        "samples": [
            {"run": number, **sample}
            for number, run in enumerate(runs, 1)
            for sample in run.samples.samples
        ],
        "neighbours": [
            {"run": number, **each} for number, run in enumerate(runs, 1) for each in run.neighbours
        ],
    }


def _whole(run: MixRun, cores: int) -> dict[str, object]:
    """Return a run's figures of the whole machine."""
    tokens = sum(event.reply.tokens for event in run.events)
    joules, rows = run.samples.joules, run.samples.samples
    owners = list(rows[0]["owners"]) if rows else []
    share = run.client_cpu_s / (run.seconds * cores) if run.seconds else None
    return {
        "goals_met": _share(run.events),
        "seconds": run.seconds,
        "cpu": _mean(rows, "cpu"),
        "peak_bytes": {name: _peak([row["owners"][name] for row in rows]) for name in owners},
        "least_free_bytes": min((row["free_bytes"] for row in rows), default=None),
        "disk_read_bytes_s": _mean(rows, "disk_read_bytes_s"),
        "disk_write_bytes_s": _mean(rows, "disk_write_bytes_s"),
        "gpu_busy": _mean([row["gpu"] or {} for row in rows], "busy"),
        "celsius": _peak([row["celsius"] for row in rows]),
        "joules": joules,
        "joules_per_token": None if joules is None or not tokens else joules / tokens,
        "sampler_cpu_s": run.samples.cpu_s,
        "client_cpu_s": run.client_cpu_s,
        "measuring_cpu_share": share,
    }


def _app(app: App, run: MixRun) -> dict[str, object]:
    """Return the figures of an application in one run.

    Tokens per second are from its first request to its last token.
    """
    events = [event for event in run.events if event.app == app.name]
    replies = [event.reply for event in events]
    tokens = sum(reply.tokens for reply in replies)
    began = min((event.at_s for event in events), default=0.0)
    ended = max((event.at_s + event.reply.end_s for event in events), default=0.0)
    counts = bool(tokens) and ended > began
    return {
        "requests": len(events),
        "failed": sum(reply.error is not None for reply in replies),
        "cancelled": sum(reply.cancelled for reply in replies),
        "goals_met": _share(events),
        "ttft_s": percentiles([r.ttft_s for r in replies if r.ttft_s is not None]),
        "tpot_s": percentiles([r.tpot_s for r in replies if r.tpot_s is not None]),
        "total_s": percentiles([r.end_s for r in replies if not (r.error or r.cancelled)]),
        "stalls": sum(reply.stalls(app.goals.stall_s) for reply in replies),
        "tokens": tokens,
        "tokens_s": tokens / (ended - began) if counts else None,
    }


def _event(event: Outcome) -> dict[str, object]:
    reply = event.reply
    return {
        "at_s": event.at_s,
        "ttft_s": reply.ttft_s,
        "tpot_s": reply.tpot_s,
        "end_s": event.at_s + reply.end_s,
        "tokens": reply.tokens,
        "prompt_tokens": reply.prompt_tokens,
        "cancelled": reply.cancelled,
        "met": event.met,
        "error": reply.error,
    }


def _share(events: Sequence[Outcome]) -> float | None:
    judged = [event.met for event in events if event.met is not None]
    return sum(judged) / len(judged) if judged else None


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def _peak(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the medians of the runs' figures by name; None if no run has the figure."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs if run.get(name) is not None]
        if values and isinstance(values[0], dict):
            found[name] = _medians(values)
        else:
            found[name] = median(values) if values else None
    return found


# -- the table -------------------------------------------------------------------------------------


def to_table(report: Mapping[str, Any]) -> str:
    """Return a result of ``to_json`` as text tables."""
    mix, cpu = report["mix"], report["machine"]["cpu"]
    lines = [
        f"{mix['name']}: {format_seconds(mix['seconds'])}, {len(mix['apps'])} applications, "
        f"{len(mix['neighbours'])} neighbours, on {cpu['name']}"
    ]
    for server in report["servers"]:
        runs = server["runs"]
        several = f" (medians of {runs} runs)" if runs > 1 else ""
        met = shown(server["goals_met"], percent)
        lines += ["", f"{server['server']}: {met} of the requests met their goals{several}", ""]
        rows = [[cell(app) for _, cell in _COLUMNS] for app in server["apps"]]
        headers = [header for header, _ in _COLUMNS]
        lines += table(rows, headers, "ll".ljust(13, "r")).split("\n")
        lines += ["", *_machine_lines(server)]
    lines += [f"{each['server']} did not run: {each['reason']}" for each in report["skipped"]]
    if report["interrupted"]:
        lines.append("interrupted: this is what was measured until then")
    return join_lines(lines)


def _machine_lines(server: Mapping[str, Any]) -> list[str]:
    def rate(value: float) -> str:
        return f"{format_bytes(value)}/s"

    owners = server["peak_bytes"] or {}
    peaks = [f"{name} {shown(peak, format_bytes)}" for name, peak in owners.items()]
    disk = [shown(server[f"disk_{way}_bytes_s"], rate) for way in ("read", "write")]
    rows = [
        ["CPU", shown(server["cpu"], percent)],
        ["peak memory", ", ".join(peaks) or NOT_MEASURED],
        ["least free", shown(server["least_free_bytes"], format_bytes)],
        ["disk, read and written", ", ".join(disk)],
        ["GPU", shown(server["gpu_busy"], percent)],
        ["highest temperature", shown(server["celsius"], "{:.0f} °C".format)],
        ["energy", shown(server["joules"], "{:.0f} J".format)],
        ["energy per token", shown(server["joules_per_token"], "{:.2f} J".format)],
        ["CPU time of measuring", shown(server["measuring_cpu_share"], "{:.2%}".format)],
    ]
    for each in server["neighbours"]:
        if each["frame_ms"]:
            times = ", ".join(f"{name} {value:.1f} ms" for name, value in each["frame_ms"].items())
            rows.append([f"frames of {each['name']}", times])
        if each.get("error"):
            rows.append([each["name"], each["error"]])
    return table(rows, ("machine", "")).split("\n")


def _times(name: str, which: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda app: format_seconds(app[name][which])


_COLUMNS: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("app", lambda app: app["app"]),
    ("class", lambda app: app["class"]),
    ("requests", lambda app: f"{app['requests']:g}"),
    ("failed", lambda app: f"{app['failed']:g}"),
    ("goals met", lambda app: shown(app["goals_met"], percent)),
    ("TTFT p50", _times("ttft_s", "p50")),
    ("p95", _times("ttft_s", "p95")),
    ("TPOT p50", _times("tpot_s", "p50")),
    ("p95", _times("tpot_s", "p95")),
    ("whole p50", _times("total_s", "p50")),
    ("p95", _times("total_s", "p95")),
    ("stalls", lambda app: f"{app['stalls']:g}"),
    ("tok/s", lambda app: format_rate(app["tokens_s"])),
)
