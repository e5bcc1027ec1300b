"""Which engine runs a file: native where it can, llama.cpp where only that can, and it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.loading import load
from tests.checkpoints.make_gguf import packed_rows, write_gguf

WIDTH, LAYERS, INNER = 256, 2, 256


def byte_vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    return ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]


def write_model(path: Path, architecture: str, weight_type: str) -> Path:
    """A tiny random model of llama's or OLMo's shape with a byte-level tokenizer."""
    rng = np.random.default_rng(0)
    vocabulary = byte_vocabulary()
    metadata: dict[str, Any] = {
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 4,
        f"{architecture}.attention.layer_norm_epsilon": 1e-5,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3] + [1] * (len(vocabulary) - 1),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }

    def matrix(rows: int) -> tuple[Any, str]:
        if weight_type != "F32":
            return packed_rows(weight_type, rows, WIDTH), weight_type
        return rng.standard_normal((rows, WIDTH), np.float32) * 0.05, "F32"

    ones = (np.ones(WIDTH, np.float32), "F32")
    tensors = {
        "token_embd.weight": matrix(len(vocabulary)),
        "output.weight": matrix(len(vocabulary)),
    }
    if architecture == "llama":
        tensors["output_norm.weight"] = ones
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            tensors[f"blk.{layer}.{name}.weight"] = matrix(WIDTH)
        if architecture == "llama":
            tensors[f"blk.{layer}.attn_norm.weight"] = ones
            tensors[f"blk.{layer}.ffn_norm.weight"] = ones
    (file,) = write_gguf(path, architecture, metadata, tensors)
    return file


def test_native(tmp_path: Path) -> None:
    with localrt.load(write_model(tmp_path / "m.gguf", "llama", "F32")) as model:
        assert model.info.engine == "native"
        assert not any("engine" in note for note in model.info.notes)
        assert len(model.generate("hi", max_tokens=4, ignore_eos=True).token_ids) == 4


@pytest.mark.parametrize(
    ("architecture", "weight_type"),
    [("olmo", "F32"), ("llama", "Q1_0")],
)
def test_unsupported_by_native(tmp_path: Path, architecture: str, weight_type: str) -> None:
    path = write_model(tmp_path / "m.gguf", architecture, weight_type)
    with pytest.raises(localrt.UnsupportedModelError, match=r"engine=.llamacpp") as caught:
        localrt.load(path, engine="native")
    assert "\n" not in str(caught.value)


@pytest.mark.llamacpp
def test_fallback(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    with localrt.load(write_model(tmp_path / "m.gguf", "olmo", "F32"), threads=1) as model:
        assert model.info.engine == "llamacpp"
        assert any("native does not know 'olmo'" in note for note in model.info.notes)
        result = model.generate("hi", max_tokens=4, ignore_eos=True)
        assert len(result.token_ids) == 4


def test_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(localrt.MissingExtraError, match="-m pip install llama-cpp-python"):
        localrt.load(write_model(tmp_path / "m.gguf", "olmo", "F32"))
