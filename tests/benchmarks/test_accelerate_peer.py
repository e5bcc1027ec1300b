"""Accelerate on a tiny model: it computes what transformers computes, its weights on disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import LocalrtError
from localrt.models.checkpoints import open_checkpoint
from localrt.quant.formats import unpack
from tests.models.make_gguf import tiny_gguf

pytest.importorskip("accelerate", reason="needs the bench extra")
pytest.importorskip("gguf", reason="transformers reads GGUF with it")

TOKENS = [5, 17, 90, 3, 44, 8, 61]


@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])  # a head of its own, and a tied one
def test_accelerate(arch: str, tmp_path: Path) -> None:
    import torch
    import transformers

    from benchmarks.accelerate_peer import bf16_folder, load_accelerate

    path = tiny_gguf(tmp_path, arch)
    folder = bf16_folder(path, tmp_path / "bf16")
    assert bf16_folder(path, folder) == folder
    with closing(open_checkpoint(path)) as source, closing(open_checkpoint(folder)) as made:
        assert set(made.tensors) == set(source.tensors)
        matrices = [name for name, info in source.tensors.items() if len(info.shape) == 2]
        for name in matrices:  # Gemma's norms are less one in one of them
            np.testing.assert_allclose(
                unpack(made.read(name)), unpack(source.read(name)), rtol=0.01, atol=0.01
            )
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


def test_bad_files(tmp_path: Path) -> None:
    from benchmarks.accelerate_peer import bf16_folder, load_accelerate

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LocalrtError, match=r"accelerate cannot load m\.gguf"):
        load_accelerate(tmp_path / "m.gguf", tmp_path)
    with pytest.raises(LocalrtError, match=r"transformers cannot load m\.gguf"):
        bf16_folder(tmp_path / "m.gguf", tmp_path / "bf16")
    assert not (tmp_path / "bf16").exists()
