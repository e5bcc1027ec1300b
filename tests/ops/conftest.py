"""Tiny models that many tests read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.tiny import TinyModel, tiny_model


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], tuple[Path, TinyModel]]:
    """From a name of ``tests/models/tiny.py`` to its folder and what transformers computes."""

    def found(name: str) -> tuple[Path, TinyModel]:
        model = tiny_model(name)
        return model.folder, model

    return found
