"""Where the real model files lie; a test that needs one skips, and says so, when it is missing."""

from pathlib import Path

import pytest

from benchmarks.common.command import find_real_model as find_real_model


def real_model(name: str) -> Path:
    """The file of a test model; skips the calling test when it is not on this machine."""
    path = find_real_model(name)
    if path is None:
        pytest.skip(f"real model {name} is not here (set LOCALRT_TEST_MODELS)")
    return path
