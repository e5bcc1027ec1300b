"""Where vision encoders are found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from safetensors.numpy import save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision import registry
from localrt.models.vision.registry import vision_source
from localrt.models.weight_files import projectors_beside
from tests.checkpoints.make_gguf import write_gguf
from tests.models.make_mmproj import write_mmproj
from tests.models.tiny import random_model


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


def test_store(folder: Path, tmp_path: Path) -> None:
    found = vision_source(_packed(tmp_path / "packed", str(folder)))
    assert isinstance(found, VisionFolder)
    assert found.path == folder
    found.close()


WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
VISION = {**WIDE, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
TEXT = {**WIDE, "num_hidden_layers": 1, "vocab_size": 64, "model_type": "llama"}


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm")
    random_model(hf.Idefics3Config(text_config=TEXT, vision_config=VISION)).save_pretrained(folder)
    return folder


def _model(path: Path, *, columns: int = 32, architecture: str = "llama") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.ones((1, columns), np.float32)
    metadata = {f"{architecture}.embedding_length": columns}
    return write_gguf(path, architecture, metadata, {"output.weight": (values, "f32")})[0]


def _found(model: Path, projectors: Sequence[Path] = ()) -> str:
    source = vision_source(model, projectors)
    if source is None:
        return ""
    source.close()
    return str(source.path.relative_to(model.parent.parent))


def test_beside_a_gguf_file(smolvlm: Path, tmp_path: Path) -> None:
    model = _model(tmp_path / "here" / "smolvlm-500m-Q4_K_M.gguf")
    assert _found(model) == ""
    for name in ("x-mmproj-F16", "mmproj-smolvlm-Q8_0", "mmproj-F32", "mmproj-BF16", "mmproj-F16"):
        write_mmproj(smolvlm, model.parent / f"{name}.gguf")
    assert [path.stem for path in projectors_beside(model)] == [
        "mmproj-smolvlm-Q8_0",
        "mmproj-BF16",
        "mmproj-F16",
        "mmproj-F32",
        "x-mmproj-F16",
    ]
    assert _found(model) == "here/mmproj-smolvlm-Q8_0.gguf"
    assert open_checkpoint(model.parent).path == model


def test_projector_of_another_model(smolvlm: Path, tmp_path: Path) -> None:
    wide = _model(tmp_path / "all" / "wide.gguf", columns=64)
    write_mmproj(smolvlm, tmp_path / "all" / "mmproj-smolvlm.gguf")
    assert _found(wide) == ""
    assert _found(_model(tmp_path / "all" / "qwen.gguf", architecture="qwen3vl")) == ""
    other = {"clip.projector_type": "unknown"}
    write_mmproj(smolvlm, tmp_path / "all" / "mmproj-other-F16.gguf", changes=other)
    assert _found(_model(tmp_path / "all" / "llama.gguf")) == "all/mmproj-smolvlm.gguf"
    with pytest.raises(UnsupportedModelError, match="projector type 'unknown' are not known"):
        vision_source(_model(tmp_path / "all" / "other-3b.gguf", columns=64))


@pytest.mark.parametrize(
    ("model", "encoders", "found"),
    [
        ("Model-Q8_0", "Model-f16 Model-heretic-f16", "Model-f16"),
        ("Model-v1.0-Q8_0", "Model-v1.0-f16 Model-v1.1-f16", "Model-v1.0-f16"),
        ("A-B-Q8_0", "A-f16 A-B-Q8_0 A-B-f16", "A-B-f16"),
        ("Model-7b-it-Q4_K_M", "f16 Other-7b-f16", "f16"),
        ("A-B-Q8_0", "A-f16 B-f16", None),
    ],
)
def test_encoders_of_several_models(
    model: str, encoders: str, found: str | None, smolvlm: Path, tmp_path: Path
) -> None:
    """The one with most words of the model's name; of equal ones none is guessed."""
    path = _model(tmp_path / "here" / f"{model}.gguf")
    for name in encoders.split():
        write_mmproj(smolvlm, path.parent / f"mmproj-{name}.gguf")
    if found is not None:
        assert _found(path) == f"here/mmproj-{found}.gguf"
        return
    with pytest.raises(CheckpointError, match=r"mmproj-A-f16.gguf and mmproj-B-f16.gguf may both"):
        vision_source(path)


def test_projector_elsewhere(smolvlm: Path, tmp_path: Path) -> None:
    model = _model(tmp_path / "blobs" / "sha256-1")
    projector = write_mmproj(smolvlm, tmp_path / "blobs" / "sha256-2")
    assert _found(model, [projector]) == "blobs/sha256-2"
    unknown = {"clip.projector_type": "mlp"}
    projector = write_mmproj(smolvlm, tmp_path / "blobs" / "sha256-3", changes=unknown)
    with pytest.raises(UnsupportedModelError, match="projector type 'mlp'"):
        vision_source(model, [projector])
