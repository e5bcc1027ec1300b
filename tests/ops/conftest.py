"""Tiny models that many tests read: each is written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """From a name of ``tests/models/tiny.py`` to its folder and transformers' own model."""
    from tests.models.tiny import save_tiny  # imports transformers

    @cache
    def saved(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        return folder, save_tiny(name, folder)

    return saved
