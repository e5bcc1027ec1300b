"""Where vision towers are found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision import registry
from localrt.models.vision.source import vision_source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a model that sees."""
    monkeypatch.setitem(registry._FILES, "seer", "seer")
    made = tmp_path / "seer"
    made.mkdir()
    config = {"model_type": "seer", "vision_config": {}}
    (made / "config.json").write_text(json.dumps(config))
    tensors = {"model.vision_tower.norm.weight": np.ones(4, np.float32)}
    save_file(tensors, made / "model.safetensors")
    return made


def _packed(path: Path, origin: object) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"source": {"name": "x", "path": origin}}))
    return path


def test_folder(folder: Path) -> None:
    found = vision_source(folder)
    assert isinstance(found, VisionFolder)
    assert list(found.tensors) == ["vision_tower.norm.weight"]
    found.close()


def test_folder_that_does_not_see(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert vision_source(folder) is None


def test_store(folder: Path, tmp_path: Path) -> None:
    found = vision_source(_packed(tmp_path / "packed", str(folder)))
    assert isinstance(found, VisionFolder)
    assert found.path == folder
    found.close()


@pytest.mark.parametrize("origin", [None, "gone", 3, "a" * 9000], ids=["none", "gone", "3", "long"])
def test_store_whose_source_is_gone(tmp_path: Path, origin: object) -> None:
    assert vision_source(_packed(tmp_path / "packed", origin)) is None
