"""bf16 folders for the peers: what transformers makes of one is what localrt makes of the file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.peers import hf_folder as module
from benchmarks.peers.hf_folder import hf_folder, hf_folder_path
from localrt.common.errors import StorageError, UnsupportedModelError
from localrt.models.checkpoints import SafetensorsCheckpoint, open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.quant.formats import unpack
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.checkpoints.make_gguf import write_gguf
from tests.models.make_gguf import write_tiny_gguf
from tests.models.tiny import SIZES, relative_error, save_tiny
from tests.real_models import real_model

TOKENS = [5, 17, 90, 3, 44, 8, 61]


def tiny_gguf(folder: Path, arch: str) -> Path:
    """A random model whose weights are exact in bf16."""
    base = folder / f"{arch}-base"
    save_tiny(arch, base)
    weights = load_file(base / "model.safetensors")
    exact = {name: w.bfloat16().float() for name, w in weights.items()}
    save_file(exact, base / "model.safetensors", metadata={"format": "pt"})
    return write_tiny_gguf(base, folder / f"{arch}.gguf", arch)


def our_logits(path: Path, tokens: list[int]) -> Any:
    with closing(open_checkpoint(path)) as checkpoint:
        decoder = load_decoder(
            checkpoint, TorchOps(compute_format="f32"), read_config(checkpoint, context=64)
        )
        cache = decoder.cache(64)
        return decoder.forward(Batch.extend([(cache, tokens)]))


def their_logits(folder: Path, tokens: list[int]) -> Any:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits(arch: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, arch)
    folder = hf_folder(path, tmp_path / "cache")
    ours, theirs = our_logits(path, TOKENS), their_logits(folder, TOKENS)
    assert relative_error(ours, theirs) < (1e-2 if arch == "gemma3" else 1e-4)  # norms less one


def test_made_once(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, "qwen2")
    lines: list[str] = []
    folder = hf_folder(path, tmp_path / "cache", notify=lines.append)
    assert len(lines) == 1
    assert hf_folder(path, tmp_path / "cache", notify=lines.append) == folder
    assert len(lines) == 1
    path.write_bytes(path.read_bytes() + b"\0" * 32)
    assert hf_folder_path(path, tmp_path / "cache") != folder


def test_files(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, "qwen2")
    folder = hf_folder(path, tmp_path / "cache")
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    count = 3 + SIZES["num_hidden_layers"]  # embedding, norm and head
    assert names[0] == f"model-00001-of-{count:05}.safetensors"
    assert len(names) == count
    with closing(open_checkpoint(path)) as source, closing(open_checkpoint(folder)) as made:
        assert set(made.tensors) == set(source.tensors)
        for name in source.tensors:
            assert made.tensors[name].format.name == "bf16"
            np.testing.assert_array_equal(unpack(made.read(name)), unpack(source.read(name)))


def test_rounding() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 0.0, 1e-30], np.float32)
    import torch

    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(module._to_bf16(values), expected)


def test_folder(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path / "model")
    with closing(open_checkpoint(tmp_path / "model")) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert hf_folder(tmp_path / "model", tmp_path / "cache") == tmp_path / "model"
    assert not (tmp_path / "cache").exists()


def test_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf(tmp_path, "qwen2")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_SPARE_BYTES", 1 << 62)
        with pytest.raises(StorageError, match="LOCALRT_CACHE"):
            hf_folder(path, tmp_path / "cache")

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_tensor", broken)
    with pytest.raises(StorageError, match="No space left"):
        hf_folder(path, tmp_path / "cache")
    assert list((tmp_path / "cache/bf16").iterdir()) == []


def test_not_translated(tmp_path: Path) -> None:
    array = np.ones((4, 32), np.float32)
    tensors = {"token_embd.weight": (array, "f32")}
    (path,) = write_gguf(tmp_path / "m.gguf", "mamba", {"mamba.block_count": 1}, tensors)
    with pytest.raises(UnsupportedModelError, match="'mamba' models are not translated"):
        hf_folder(path, tmp_path / "cache")


@pytest.mark.real
def test_real_model(tmp_path: Path) -> None:
    path = real_model("smollm2")
    folder = hf_folder(path, tmp_path)
    ours, theirs = our_logits(path, TOKENS), their_logits(folder, TOKENS)
    assert relative_error(ours, theirs) < 3e-2  # weights rounded to bf16
    assert list(ours.argmax(-1)) == list(theirs.argmax(-1))
