"""Accelerate on a tiny model: it computes what transformers computes, its weights on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.hf_folder import hf_folder
from localrt.common.errors import LocalrtError
from tests.benchmarks.test_hf_folder import TOKENS, tiny_gguf

pytest.importorskip("accelerate", reason="needs the bench extra")


@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])  # a head of its own, and a tied one
def test_accelerate(arch: str, tmp_path: Path) -> None:
    import torch
    import transformers

    from benchmarks.peers.streamers import load_accelerate

    path = tiny_gguf(tmp_path, arch)
    folder = hf_folder(path, tmp_path / "cache")
    engine = load_accelerate(path, folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        ours = engine._model(torch.tensor([TOKENS])).logits
        assert torch.equal(ours, plain.eval()(torch.tensor([TOKENS])).logits)
    placed = {tensor.device.type for tensor in engine._model.model.layers.parameters()}
    assert placed == {"meta"}  # nothing stays in memory
    firsts: list[int] = []
    metrics = engine.generate(TOKENS, 4, lambda: firsts.append(1))
    assert (metrics.prompt_tokens, metrics.completion_tokens, firsts) == (len(TOKENS), 4, [1])
    assert (metrics.decode_tok_s or 0) > 0


def test_accelerate_bad_folder(tmp_path: Path) -> None:
    from benchmarks.peers.streamers import load_accelerate

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LocalrtError, match=r"accelerate cannot load m\.gguf"):
        load_accelerate(tmp_path / "m.gguf", tmp_path)
