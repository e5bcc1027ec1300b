"""The machine of ``machine.py``: 20,000 steps; ``scripts/campaign storage`` does a million."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.history.machine import Storage


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    steps = settings(max_examples=400, stateful_step_count=50)
    run_state_machine_as_test(Storage, settings=steps)  # type: ignore[no-untyped-call]
