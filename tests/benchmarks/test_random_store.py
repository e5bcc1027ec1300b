"""Random stores: what load takes, no unit like another."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import localrt
from benchmarks.common.random_store import write_store
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint

CONFIG = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def test_random_store(tmp_path: Path) -> None:
    write_store(tmp_path / "model", "Qwen3ForCausalLM", CONFIG, "int4-g32")
    with localrt.load(tmp_path / "model", device="cpu", ctx=64, draft="off") as model:
        answer = model.generate(token_ids=[3, 1, 4], max_tokens=12, temperature=0, ignore_eos=True)
        (rows,) = model.logits([3, 1, 4])
    assert len(set(answer.token_ids)) > 3, "a model that says one word hides mistakes"
    assert np.isfinite(rows).all()
    assert not np.array_equal(rows[0], rows[1])


def test_no_two_matrices_are_the_same(tmp_path: Path) -> None:
    write_store(tmp_path / "model", "Qwen3ForCausalLM", CONFIG, "int4-g32")
    store = StoreCheckpoint(tmp_path / "model")
    found = [
        next(iter(store.blocks(name))).data.tobytes()
        for name, info in store.tensors.items()
        if len(info.shape) == 2
    ]
    store.close()
    assert len(set(found)) == len(found) == 30
