"""Accelerate, and AirLLM where its environment is there, on a tiny model: they compute what
transformers computes, with their weights on disk."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.peers.airllm_env import peer_python
from benchmarks.peers.hf_folder import hf_folder
from localrt.common.errors import LocalrtError
from tests.benchmarks.test_hf_folder import TOKENS, tiny_gguf

pytest.importorskip("accelerate", reason="needs the bench extra")

ROOT = Path(__file__).parents[2]


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


def test_airllm(tmp_path: Path) -> None:
    python = peer_python("airllm")
    if python is None:
        pytest.skip("scripts/bench_peers makes the environment of airllm")
    path = tiny_gguf(tmp_path, "qwen2")
    folder = hf_folder(path, tmp_path / "cache")
    code = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks.peers.streamers import load_airllm
engine = load_airllm(Path({str(path)!r}), Path({str(folder)!r}))
metrics = engine.generate({TOKENS}, 3, lambda: None)
print("\\n" + json.dumps([metrics.completion_tokens, metrics.decode_tok_s, engine.info["version"]]))
"""
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens, rate, version = json.loads(done.stdout.splitlines()[-1])
    assert tokens == 3
    assert rate > 0
    assert version == "4.0.0"
