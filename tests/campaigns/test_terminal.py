"""A few tries of the campaign."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

if os.name != "nt":
    from tests.campaigns.terminal import CASES
pytestmark = pytest.mark.skipif(os.name == "nt", reason="Unix terminals")


@pytest.mark.parametrize("case", ["SIGTSTP", "SIGTERM", "pastes"])
def test_terminal(case: str, tmp_path: Path) -> None:
    assert CASES[case](random.Random(1), tmp_path) == ""
