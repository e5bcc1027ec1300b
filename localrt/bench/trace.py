"""A pipeline's tasks as a trace file for Perfetto and Chrome (``chrome://tracing``).

The format is the Trace Event Format, in its JSON form, with "complete" events ("ph": "X").
Each resource (the disk, a copy stream, compute) is one line of it, or several where its tasks
overlap, which a line cannot show. It does not know what ran.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from localrt.files import write_text

__all__ = ["to_chrome", "write_trace"]

_PROCESS = 1


def to_chrome(events: Sequence[Mapping[str, Any]], *, process: str) -> dict[str, Any]:
    """Events of ``{"name", "resource", "start_s", "end_s"}`` in Chrome's format, in microseconds.

    Time starts at the first event; resources are numbered in the order they first appear.
    """
    start = min((event["start_s"] for event in events), default=0.0)
    threads: dict[tuple[str, int], int] = {}
    free_at: dict[str, list[float]] = {}  # when each line of a resource is free again
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
                "pid": _PROCESS,
                "tid": threads.setdefault((resource, line), len(threads) + 1),
            }
        )
    names = [_named("process_name", 0, process)]
    for (resource, line), thread in threads.items():
        names.append(_named("thread_name", thread, f"{resource} {line + 1}" if line else resource))
    return {"traceEvents": names + complete, "displayTimeUnit": "ms"}


def write_trace(path: Path, events: Sequence[Mapping[str, Any]], *, process: str) -> None:
    """Write the trace of ``events`` to ``path``, whole or not at all.

    Raises:
        StorageError: the file cannot be written.
    """
    write_text(path, json.dumps(to_chrome(events, process=process)) + "\n")


def _first_free(lines: list[float], start: float, end: float) -> int:
    """The first line that is free at ``start``, taken until ``end``."""
    for line, free in enumerate(lines):
        if free <= start:
            lines[line] = end
            return line
    lines.append(end)
    return len(lines) - 1


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}
