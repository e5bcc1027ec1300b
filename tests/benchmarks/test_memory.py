"""Real processes stay within their budgets, and take what was forecast: twelve cells of the matrix.

All of it: ``python -m benchmarks.memory``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory.cells import TESTED, Cell
from benchmarks.memory.measuring import measure, problems
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
