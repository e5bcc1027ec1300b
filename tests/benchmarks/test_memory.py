"""Real processes stay within their budgets, and take what was forecast: twelve cells of the matrix.

All of it: ``python -m benchmarks.memory``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory.cells import TESTED, Cell
from benchmarks.memory.measuring import measure, problems
from localrt.bench.memory_limit import MemoryLimit
from localrt.errors import LocalrtError
from tests.real_models import real_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed models and measurements, made once."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("cell", TESTED, ids=lambda cell: cell.name)
def test_a_budget_holds_and_the_forecast_is_near(cell: Cell, home: Path) -> None:
    result = measure(cell, {cell.model: real_model(cell.model)}, home)
    assert problems(result) == []


def test_there_are_twelve() -> None:
    assert len(TESTED) == 12


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [92, 120, 250])
def test_a_first_run_answers_under_a_limit_of_exactly_the_budget(
    megabytes: int, tmp_path: Path
) -> None:
    """The kernel ends what takes more; nothing is measured or packed before."""
    try:
        limit = MemoryLimit.create(megabytes * 1_000_000)
    except LocalrtError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "localrt", "run", str(real_model("smollm2")), "--raw"]
    command += ["The capital of France is", "--ram", f"{megabytes}MB", "--ctx", "1024"]
    command += ["--temperature", "0", "--max-tokens", "8"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LOCALRT_CACHE": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)},
            preexec_fn=lambda: limit.add(os.getpid()),
            capture_output=True,
            text=True,
        )
    finally:
        limit.remove()
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
