"""``localrt show``: of models that are here, and of short names that are not."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from localrt.cli import main
from tests.conftest import write_tiny_model
from tests.models.make_gguf import write_tiny_gguf
from tests.models.make_mmproj import write_mmproj
from tests.models.tiny import random_model
from tests.models.tiny_heads import TinyBlock, TinyEagle3
from tests.models.vision.test_mmproj import MODELS


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


def test_a_short_name_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    assert main(["show", "gpt-oss"]) == 0
    out = capsys.readouterr().out
    assert "20.9 B parameters" in out
    assert "`localrt pull gpt-oss:20b`" in out


def test_a_name_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpt-os"]) == 1
    assert "did you mean gpt-oss" in capsys.readouterr().err


def test_mtp_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown and planned, of a folder and of a file; what holds only that is no model."""
    TinyBlock("qwen3.5", tmp_path)
    path = write_tiny_gguf(tmp_path, tmp_path / "m.gguf", "qwen3.5", predicting=1)
    plain = write_tiny_gguf(tmp_path, tmp_path / "plain.gguf", "qwen3.5")
    for command in ("show", "plan"):
        for model, has in ((tmp_path, True), (path, True), (plain, False)):
            assert main([command, str(model), "--json"]) == 0
            record = json.loads(capsys.readouterr().out)
            assert record["draft"] == ("mtp" if has else "")
            notes = " ".join(record["notes"])
            assert (re.search(r"its MTP block of \d+ kB drafts for it", notes) is not None) == has
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    alone = tmp_path / "mtp-m.gguf"
    write_tiny_gguf(tmp_path, alone, "qwen3.5", predicting=1, only_block=True)
    for command in (["show"], ["plan"], ["run"]):
        assert main([*command, str(alone), *["text"] * (command[0] == "run")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "holds only the MTP block of a model" in line
        assert line.endswith("with --draft mtp-m.gguf")


def test_vision_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model(MODELS["gemma3"]()).save_pretrained(tmp_path / "folder")
    model = write_tiny_gguf(tmp_path / "folder", tmp_path / "tiny.gguf", "gemma3")
    assert main(["show", str(model)]) == 0
    assert "pictures" not in capsys.readouterr().out
    write_mmproj(tmp_path / "folder", tmp_path / "mmproj-F32.gguf")
    for path in (model, tmp_path / "folder"):
        assert main(["show", str(path)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "pictures some 16 tokens for 896 x 896 pixels" in out
    assert main(["show", str(model), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["picture_tokens"] == 16
    assert record["picture_bytes"] > record["vision_bytes"] > 1000
    assert main(["plan", str(model)]) == 0
    assert "A picture (896 x 896 pixels) has 16 tokens and is seen in" in capsys.readouterr().out
    assert main(["plan", str(model), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["picture"]
    assert (planned["tokens"], planned["nbytes"]) == (16, record["picture_bytes"])
    assert planned["seconds"] > 0
    assert not planned["on_gpu"]
    assert main(["plan", str(model), "--gpu", "rtx 4060"]) == 0
    assert "of GPU memory." in " ".join(capsys.readouterr().out.split())
    write_mmproj(
        tmp_path / "folder", tmp_path / "mmproj-F32.gguf", changes={"clip.projector_type": "other"}
    )
    assert main(["show", str(model)]) == 0
    assert "pictures are refused: " in capsys.readouterr().out


def test_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named by what describes a model, if they lie beside it."""
    model, head = tmp_path / "tiny-1b", tmp_path / "tiny-1b-eagle3"
    for folder in (model, head):
        folder.mkdir()
    write_tiny_model(model)
    TinyEagle3(head, 64, 259)
    for command in ("show", "plan"):
        assert main([command, str(model)]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert f"{head} drafts for it" in words
        assert main([command, str(model), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["draft"] == str(head)
    gpu = "virtual:1GB@12GB/s,256GB/s,20TFLOPS"
    assert main(["plan", str(model), "--gpu", gpu, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == str(head)  # all weights are on the GPU


@pytest.mark.parametrize("offline", ["0", "1"])
@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("llama3.2:3b", 0, "source   https://huggingface.co/unsloth/Llama-3.2-3B-Instruct-GGUF"),
        ("org/nothing:Q4_K_M", 1, "org/nothing:Q4_K_M is not on this machine"),
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


def test_tool_calls_of_an_unknown_syntax(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = "<call>{{ m.tool_calls[0].function.name }}: {{ m.tool_calls[0].function.arguments }}"
    source = (
        "{{ tools }}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
        f"{call}</call>{{% endif %}}{{% endfor %}}"
    )
    write_tiny_model(tmp_path, template=source)
    assert main(["show", str(tmp_path)]) == 0
    assert "in an unknown syntax: they stay text" in capsys.readouterr().out
