"""One wave of memory over tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrt.common.errors import LocalrtError
from tests.campaigns import memory
from tests.campaigns.campaign import Run


@pytest.mark.timeout(300)
def test_wave(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        memory.MemoryLimit.create(1 << 30).remove()
    except LocalrtError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(memory, "find_model", lambda name: tiny_folder)
    monkeypatch.setattr(memory, "_TURNS", 1)
    run = Run("memory", tmp_path, seed=1, seconds=60, count=1)
    memory.body(run)
    assert run.done("wave") == 1
    assert run.failures == []
