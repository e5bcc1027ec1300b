"""The machine of ``machine.py``: 20,000 steps; ``scripts/campaign storage`` takes a million."""

from __future__ import annotations

import pytest

from tests.history.machine import EXAMPLE_STEPS, drive


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    drive(20_000 // EXAMPLE_STEPS)
