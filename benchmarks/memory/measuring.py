"""Runs one cell in a process of its own and watches what its whole tree takes.

What counts is the resident set of the process, and, while helpers run that it has started
(measuring, solving, rendering), what all of them take: pages that several map count once, as in the
kernel's limits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.command import ROOT
from benchmarks.memory.cells import Cell

_EVERY_S = 0.02
_LEAST = re.compile(r"at least (\d+) MB of RAM")
_SHARE, _BYTES = 0.03, 8_000_000
_PROMPT = "Tell me about lighthouses, at length."


def measure(cell: Cell, paths: dict[str, Path], home: Path) -> dict[str, Any]:
    """The cell's outcome; ``home`` is where packed models and measurements are kept."""
    path = paths[cell.model]
    budget = cell.budget(path.stat().st_size)
    if cell.ram == "least":
        refused = _run(cell, paths, home, 1_000_000)
        found = _LEAST.search(refused.get("text", ""))
        if found is None:
            return {**refused, "budget": None, "outcome": "no least budget"}
        budget = int(found[1]) * 1_000_000
    if not cell.cold:
        result = {"budget": budget, **_run(cell, paths, home, budget)}
        if cell.ram == "least" and result["outcome"] == "refused":
            result["outcome"] = "its own least was refused"
        return result
    with tempfile.TemporaryDirectory() as folder:
        return {"budget": budget, **_run(cell, paths, Path(folder), budget)}


def problems(result: dict[str, Any]) -> list[str]:
    """What does not hold: peak within the budget, forecast near the peak, no late failure."""
    found = []
    budget, peak, forecast = (result.get(key) for key in ("budget", "peak", "forecast"))
    if result["outcome"] not in ("answered", "refused"):
        found.append(f"{result['outcome']}: {result.get('text', '')}")
    if result["outcome"] == "refused" and not _LEAST.search(result["text"]):
        found.append(f"refused without the number that would do: {result['text']}")
    if budget is not None and result["tree_peak"] > budget:
        found.append(f"{result['tree_peak'] / 1e6:.1f} MB in a budget of {budget / 1e6:.1f} MB")
    if forecast is not None and abs(forecast - peak) > max(_SHARE * peak, _BYTES):
        found.append(f"{peak / 1e6:.1f} MB where {forecast / 1e6:.1f} MB were forecast")
    return found


def _run(cell: Cell, paths: dict[str, Path], home: Path, budget: int | None) -> dict[str, Any]:
    load: dict[str, Any] = {
        "ctx": cell.ctx,
        "format": cell.format,
        "kv_format": cell.kv_format,
        "draft": str(paths[cell.draft]) if cell.draft in paths else cell.draft,
        "ram": budget,
        "device": "cpu",
    }
    if cell.way == "run":
        command = [sys.executable, "-m", "localrt", "run", str(paths[cell.model]), _PROMPT]
        command += ["--max-tokens", "60", "--device", "cpu", "--ctx", str(cell.ctx)]
        command += ["--ram", str(budget)] if budget else []
    else:
        job = {"path": str(paths[cell.model]), "way": cell.way, "load": load}
        job |= {"long_answer": cell.long_answer}
        command = [sys.executable, "-m", "benchmarks.memory.child", json.dumps(job)]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LOCALRT_CACHE": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=err)
        peak, tree = _watch(process)
        for file in (out, err):
            file.seek(0)
        said, complaint = out.read().decode(), err.read().decode()
    result: dict[str, Any]
    if cell.way == "run":
        outcome = "answered" if process.returncode == 0 else "refused"
        result = {"outcome": outcome, "text": complaint.strip(), "peak": peak, "forecast": None}
    elif process.returncode:
        result = {"outcome": "crashed", "text": complaint[-2000:], "peak": peak}
    else:
        result = json.loads(said)
    return {**result, "tree_peak": max(tree, peak, result["peak"] or 0)}


def _watch(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Peaks of the process and of its tree, in bytes."""
    peak = tree = 0
    with suppress(psutil.Error):
        root = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error, OSError, ValueError):
                peak = max(peak, _high_water(process.pid))
                taken = [each.memory_full_info() for each in _family(root)]
                shared = max(info.rss - info.uss for info in taken)
                tree = max(tree, sum(info.uss for info in taken) + shared)
            time.sleep(_EVERY_S)
    return peak, tree


def _family(root: psutil.Process) -> list[psutil.Process]:
    """The process and all below it that run programs of their own: one that has begun and runs its
    parent's still has the parent's memory, which would count twice.
    """
    found = [root]
    for parent in found:
        with suppress(psutil.Error):
            words = parent.cmdline()
            found += [child for child in parent.children() if child.cmdline() != words]
    return found


def _high_water(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
