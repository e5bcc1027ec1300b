"""Tiny models that see, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.vision.tiny_qwen import save_tiny_vl
from tests.ops.cuda.conftest import emulator

__all__ = ["emulator"]


@pytest.fixture(scope="session")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The folder and transformers' model of one of ``TINY``."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, save_tiny_vl(kind, folder)
        return made[kind]

    return make
