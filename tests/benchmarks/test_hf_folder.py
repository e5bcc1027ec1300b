"""bf16 folders for the peers: what transformers makes of one is what localrt makes of the file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import hf_folder as module
from benchmarks.peers.hf_folder import hf_folder, hf_folder_path
from localrt.common.errors import StorageError, UnsupportedModelError
from localrt.models.checkpoints import SafetensorsCheckpoint, open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.quant.formats import unpack
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.checkpoints.make_gguf import in_pairs, write_gguf
from tests.models.tiny import relative_error, save_tiny
from tests.real_models import real_model

HIDDEN, INNER, HEADS, GROUPS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 101, 2
SIZES = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": GROUPS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
TOKENS = [5, 17, 90, 3, 44, 8, 61]


def tiny_gguf(folder: Path, arch: str) -> Path:
    """A random model whose weights are exact in bf16."""
    rng = np.random.default_rng(0)

    def values(*shape: int) -> Any:
        wide = 0.2 * rng.standard_normal(shape, np.float32) + (1 if len(shape) == 1 else 0)
        return (wide.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    tensors = {
        "token_embd.weight": values(VOCAB, HIDDEN),
        "output_norm.weight": values(HIDDEN),
    }
    if arch != "gemma3":
        tensors["output.weight"] = values(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        queries, keys = values(HEADS * HEAD_DIM, HIDDEN), values(GROUPS * HEAD_DIM, HIDDEN)
        if arch == "llama":
            queries, keys = in_pairs(queries, HEADS), in_pairs(keys, GROUPS)
        part = {
            "attn_norm.weight": values(HIDDEN),
            "attn_q.weight": queries,
            "attn_k.weight": keys,
            "attn_v.weight": values(GROUPS * HEAD_DIM, HIDDEN),
            "attn_output.weight": values(HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm.weight": values(HIDDEN),
            "ffn_gate.weight": values(INNER, HIDDEN),
            "ffn_up.weight": values(INNER, HIDDEN),
            "ffn_down.weight": values(HIDDEN, INNER),
        }
        if arch == "qwen2":
            part |= {"attn_q.bias": values(64), "attn_k.bias": values(32)}
            part |= {"attn_v.bias": values(32)}
        if arch in ("qwen3", "gemma3"):
            part |= {"attn_q_norm.weight": values(HEAD_DIM), "attn_k_norm.weight": values(HEAD_DIM)}
        if arch == "gemma3":
            part |= {"post_attention_norm.weight": values(HIDDEN)}
            part |= {"post_ffw_norm.weight": values(HIDDEN)}
        tensors |= {f"blk.{layer}.{name}": array for name, array in part.items()}
    keys_ = {f"{arch}.{key}": value for key, value in SIZES.items()}
    if arch == "gemma3":
        keys_["gemma3.attention.sliding_window"] = 32
    typed = {name: (array, "f32") for name, array in tensors.items()}
    (path,) = write_gguf(folder / f"{arch}.gguf", arch, keys_, typed)
    return path


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
def test_transformers_computes_the_same_from_the_folder(arch: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, arch)
    folder = hf_folder(path, tmp_path / "cache")
    ours, theirs = our_logits(path, TOKENS), their_logits(folder, TOKENS)
    assert relative_error(ours, theirs) < (1e-2 if arch == "gemma3" else 1e-4)  # norms less one


def test_the_folder_is_made_once_and_again_for_another_file(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, "qwen2")
    lines: list[str] = []
    folder = hf_folder(path, tmp_path / "cache", notify=lines.append)
    assert len(lines) == 1
    assert hf_folder(path, tmp_path / "cache", notify=lines.append) == folder
    assert len(lines) == 1
    path.write_bytes(path.read_bytes() + b"\0" * 32)
    assert hf_folder_path(path, tmp_path / "cache") != folder


def test_every_layer_has_a_file_and_values_are_rounded(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, "qwen2")
    folder = hf_folder(path, tmp_path / "cache")
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    assert names[0] == "model-00001-of-00005.safetensors"  # embedding, norm, head, two layers
    assert len(names) == 5
    with closing(open_checkpoint(path)) as source, closing(open_checkpoint(folder)) as made:
        assert set(made.tensors) == set(source.tensors)
        for name in source.tensors:
            assert made.tensors[name].format.name == "bf16"
            np.testing.assert_array_equal(unpack(made.read(name)), unpack(source.read(name)))


def test_rounding_is_to_the_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 0.0, 1e-30], np.float32)
    import torch

    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(module._to_bf16(values), expected)


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path / "model")
    with closing(open_checkpoint(tmp_path / "model")) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert hf_folder(tmp_path / "model", tmp_path / "cache") == tmp_path / "model"
    assert not (tmp_path / "cache").exists()


def test_nothing_is_left_of_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_is_not_translated_is_said(tmp_path: Path) -> None:
    array = np.ones((4, 32), np.float32)
    tensors = {"token_embd.weight": (array, "f32")}
    (path,) = write_gguf(tmp_path / "m.gguf", "mamba", {"mamba.block_count": 1}, tensors)
    with pytest.raises(UnsupportedModelError, match="'mamba' models are not translated"):
        hf_folder(path, tmp_path / "cache")


@pytest.mark.real
def test_a_real_model_gives_our_logits(tmp_path: Path) -> None:
    path = real_model("smollm2")
    folder = hf_folder(path, tmp_path)
    ours, theirs = our_logits(path, TOKENS), their_logits(folder, TOKENS)
    assert relative_error(ours, theirs) < 3e-2  # weights rounded to bf16
    assert list(ours.argmax(-1)) == list(theirs.argmax(-1))
