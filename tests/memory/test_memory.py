"""Real processes stay within their budgets, and take what was forecast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common.memory_limit import MemoryLimit
from localrt.common.errors import LocalrtError
from tests.memory.measuring import CELLS, Cell, measure, problems
from tests.real_models import real_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed models and measurements, made once."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_budget_and_forecast(cell: Cell, home: Path) -> None:
    result = measure(cell, real_model("smollm2"), home)
    assert problems(result) == []


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("megabytes", ["least", 120, 250])
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
