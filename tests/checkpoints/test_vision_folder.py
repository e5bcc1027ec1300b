"""Folders with vision encoders whose files are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localrt.common.errors import LocalrtError
from localrt.models.vision.registry import vision_source
from tests.models.vision.tiny import qwen_folder
from tests.mutations import is_line

DAMAGED: dict[str, tuple[str, Any, str]] = {
    "no weight_map": ("model.safetensors.index.json", {}, "has no weight_map"),
    "a list": ("model.safetensors.index.json", {"weight_map": []}, "has no weight_map"),
    "another folder": (
        "model.safetensors.index.json",
        {"weight_map": {"visual.a.weight": "../x.safetensors"}},
        "lies in no file of this folder",
    ),
    "a processor": ("preprocessor_config.json", {"image_processor": [1]}, "not an object"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_one_line(name: str, tmp_path: Path) -> None:
    file, contents, words = DAMAGED[name]
    folder = qwen_folder(tmp_path / "model")
    (folder / file).write_text(json.dumps(contents))
    if "index" in file:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(LocalrtError, match=words) as caught:
        vision_source(folder)
    assert is_line(str(caught.value))
