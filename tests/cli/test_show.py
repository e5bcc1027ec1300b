"""``localrt show`` of models that are here, and of short names that are not; ``localrt embed``."""

from __future__ import annotations

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest

import localrt
from localrt.cli import main


def test_a_folder(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tiny_folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["family"].startswith("LlamaForCausalLM, ")
    assert lines["template"] == "its own"
    assert lines["where"].startswith("your files: ")
    assert main(["show", str(tiny_folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["path"] == str(tiny_folder)
    assert record["weights"] > 0


@pytest.mark.slow
def test_vision_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.models.make_gguf import write_tiny_gguf
    from tests.models.make_mmproj import write_mmproj
    from tests.models.tiny import random_model
    from tests.models.vision.test_mmproj import MODELS

    random_model(MODELS["gemma3"]()).save_pretrained(tmp_path / "folder")
    model = write_tiny_gguf(tmp_path / "folder", tmp_path / "tiny.gguf", "gemma3")
    assert main(["show", str(model)]) == 0
    assert "pictures" not in capsys.readouterr().out
    write_mmproj(tmp_path / "folder", tmp_path / "mmproj-F32.gguf")
    for path in (model, tmp_path / "folder"):
        assert main(["show", str(path)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "pictures some 16 tokens for 896 x 896 pixels" in out
    assert main(["plan", str(model), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["picture"]
    assert planned["tokens"] == 16
    assert planned["seconds"] > 0
    write_mmproj(
        tmp_path / "folder", tmp_path / "mmproj-F32.gguf", changes={"clip.projector_type": "other"}
    )
    assert main(["show", str(model)]) == 0
    assert "pictures are refused: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("offline", "name", "status", "says"),
    [
        ("0", "llama3.2:3b", 0, "source   https://huggingface.co/unsloth/Llama-3.2-3B-Instruct"),
        ("1", "org/nothing:Q4_K_M", 1, "org/nothing:Q4_K_M is not on this machine"),
    ],
)
def test_not_on_this_machine(
    offline: str,
    name: str,
    status: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offline, nobody is sent to ``pull``, which then fails."""
    monkeypatch.setenv("LOCALRT_OFFLINE", offline)
    assert main(["show", name]) == status
    told = "".join(capsys.readouterr())
    assert says in told
    assert ("localrt pull" in told) == (offline == "0")
    assert ("offline mode is on" in told) == (offline == "1")


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    from tests.models.tiny_encoders import ENCODERS, save_encoder, word_pieces

    save_encoder(ENCODERS["bert"], tmp_path)
    word_pieces(tmp_path)
    return tmp_path


def test_vectors(
    encoder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with localrt.load(encoder) as model:
        wanted = model.embed(["a fox", "x"])
    assert main(["embed", str(encoder), "a fox", "x"]) == 0
    printed = capsys.readouterr().out
    found = [json.loads(line) for line in printed.splitlines()]
    assert np.allclose(found, wanted, atol=1e-6)
    pipe = TextIOWrapper(BytesIO(b"a fox\r\nx\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", pipe)
    assert main(["embed", str(encoder)]) == 0
    assert capsys.readouterr().out == printed
