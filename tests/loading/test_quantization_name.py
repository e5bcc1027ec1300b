"""One name for a quantization: of the list, of ``show``, of a loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import localrt
from localrt.cli import main
from localrt.hub.files import gguf_variants
from localrt.loading.format_names import quantization_name


def checkpoint(name: str, file_type: Any = None, kind: str = "gguf", **bytes_of: int) -> Any:
    tensors = {
        each: SimpleNamespace(
            name=each, shape=(4, 4), nbytes=size, format=SimpleNamespace(name=each)
        )
        for each, size in bytes_of.items()
    }
    metadata = {} if file_type is None else {"general.file_type": file_type}
    return SimpleNamespace(path=Path(name), kind=kind, metadata=metadata, tensors=tensors)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (checkpoint("qwen-q4_k_m.gguf", 15, q5_0=9, q4_k=5), "Q4_K_M"),
        (checkpoint("m-UD-Q4_K_XL.gguf", 15, q4_k=5), "UD-Q4_K_XL"),
        (checkpoint("m-Q6_K-00001-of-00003.gguf", q6_k=5), "Q6_K"),
        (checkpoint("sha256-0123", 17, q5_k=5), "Q5_K_M"),  # Ollama's
        (checkpoint("model.gguf", 2000, q5_k=5), "q5_k"),
        (checkpoint("model.gguf", [1], q5_k=5), "q5_k"),
        (checkpoint("folder", kind="safetensors", bf16=3, int4=5), "int4"),
        (checkpoint("empty", kind="safetensors"), ""),
    ],
)
def test_names(of: Any, name: str) -> None:
    assert quantization_name(cast(Any, of)) == name
    label = next(iter(gguf_variants([of.path.name])), None)
    if label is not None and label.is_labelled:
        assert label.label == name, "as the list has it"


def test_show_and_loaded_model(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tiny_folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["quantization"]
    with localrt.load(str(tiny_folder)) as model:
        assert model.info.quantization == shown
    with localrt.load(str(tiny_folder), format="f32") as model:
        assert model.info.quantization == "f32"
