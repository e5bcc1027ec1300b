"""Real processes stay within their budgets, and take what was forecast."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common.memory_limit import MemoryLimit
from localrt.common.errors import LocalrtError
from tests.memory import child
from tests.real_models import real_model

ROOT = Path(__file__).parents[2]
_PROCESS = 70_000_000  # what a budget has beside its share of the weights
_EVERY_S = 0.02
_LEAST = re.compile(r"at least (\d+) MB of RAM")
_SHARE, _BYTES = 0.03, 8_000_000
_PROMPT = "Tell me about lighthouses, at length."


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """``ram`` is a share of the model's file beside the process, ``"least"`` what the refusal of
    a smaller budget says that would do, None no budget.

    ``way`` is one of ``child``'s, or ``"run"`` (the command). ``cold``: nothing was measured on
    this machine before.
    """

    way: str = "generate"
    ram: float | str | None = None
    ctx: int | None = None
    kv_format: str | None = None
    long_answer: int = 100
    cold: bool = False


CELLS = (
    Cell(ctx=2048),
    Cell(ram=0.4, ctx=2048, long_answer=20),  # weights are read for each token
    Cell(way="fill", ram="least", ctx=1024, kv_format="int8", long_answer=20),
    Cell(way="chat", ram=0.25),
    Cell(way="serve", ram=0.5, ctx=2048),
    Cell(way="run", ram=0.25, ctx=1024, cold=True),
)


def measure(cell: Cell, path: Path, home: Path) -> dict[str, Any]:
    """The cell's outcome; ``home`` is where packed models and measurements are kept."""
    budget = None
    if isinstance(cell.ram, float):
        budget = round(_PROCESS + cell.ram * path.stat().st_size)
    elif cell.ram == "least":
        refused = _run(cell, path, home, 1_000_000)
        found = _LEAST.search(refused.get("text", ""))
        if found is None:
            return {**refused, "budget": None, "outcome": "no least budget"}
        budget = int(found[1]) * 1_000_000
    if not cell.cold:
        result = {"budget": budget, **_run(cell, path, home, budget)}
        if cell.ram == "least" and result["outcome"] == "refused":
            result["outcome"] = "its own least was refused"
        return result
    with tempfile.TemporaryDirectory() as folder:
        return {"budget": budget, **_run(cell, path, Path(folder), budget)}


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


def _run(cell: Cell, path: Path, home: Path, budget: int | None) -> dict[str, Any]:
    if cell.way == "run":
        command = [sys.executable, "-m", "localrt", "run", str(path), _PROMPT]
        command += ["--max-tokens", "60", "--device", "cpu", "--ctx", str(cell.ctx)]
        command += ["--ram", str(budget)] if budget else []
    else:
        load = {"ctx": cell.ctx, "kv_format": cell.kv_format, "ram": budget, "device": "cpu"}
        job = {"path": str(path), "way": cell.way, "load": load, "long_answer": cell.long_answer}
        command = [sys.executable, "-m", child.__name__, json.dumps(job)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
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
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed models and measurements, made once."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.way}, ram {cell.ram or 'free'}")
def test_budget_and_forecast(cell: Cell, home: Path) -> None:
    result = measure(cell, real_model("smollm2"), home)
    assert problems(result) == []


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("megabytes", ["least", 120])
def test_a_first_run_answers_under_a_limit_of_exactly_the_budget(
    megabytes: int | str, tmp_path: Path
) -> None:
    """The kernel ends what takes more; nothing is measured or packed before.

    ``least`` is what a refusal names: how much the libraries take depends on the machine.
    """
    if megabytes == "least":
        refused = _first_run(60, tmp_path)
        assert refused.returncode == 1
        found = re.search(r"give it at least \d+ MB of RAM \(--ram (\d+)MB\)", refused.stderr)
        assert found, refused.stderr
        megabytes = int(found[1])
        assert megabytes <= 117  # of which the confined process of templates takes 12
    try:
        limit = MemoryLimit.create(int(megabytes) * 1_000_000)
    except LocalrtError as error:
        pytest.skip(str(error))
    try:
        done = _first_run(int(megabytes), tmp_path, lambda: limit.add(os.getpid()))
    finally:
        limit.remove()
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def _first_run(
    megabytes: int, data: Path, limited: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localrt", "run", str(real_model("smollm2")), "--raw"]
    command += ["The capital of France is", "--ram", f"{megabytes}MB", "--ctx", "1024"]
    command += ["--temperature", "0", "--max-tokens", "8"]
    env = {**os.environ, "LOCALRT_CACHE": str(data), "XDG_DATA_HOME": str(data)}
    return subprocess.run(command, env=env, preexec_fn=limited, capture_output=True, text=True)
