"""Configs of random models for ``scripts/gpu_check``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.common.random_store import RandomCheckpoint
from localrt.hub.known_models import find_known
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.ops.protocol import Batch

TINY: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
# For interpreted kernels.
SMALLEST: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 64},
    "Gemma2ForCausalLM": {
        "head_dim": 64,
        "sliding_window": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": {"head_dim": 64, "sliding_window": 32},
    "Phi3ForCausalLM": {"sliding_window": 64},
    "SmolLM3ForCausalLM": {},
}


def known_config(name: str) -> dict[str, Any]:
    """The config of a model that localrt knows."""
    known = find_known(name)
    assert known is not None, name
    return dict(known.config())


QWEN_1_5B = known_config("qwen2.5-coder:1.5b")  # most published figures are of this model


def tiny_config(device: str) -> dict[str, Any]:
    """A few small layers; one, smaller still, if the CPU interprets kernels."""
    return TINY if device.startswith("cuda") else {**TINY, **SMALLEST, "num_hidden_layers": 1}


def resident_config(device: str) -> dict[str, Any]:
    """A real model's config on a GPU, a tiny one elsewhere."""
    return QWEN_1_5B if device.startswith("cuda") else tiny_config(device)


def random_model(architecture: str, config: Mapping[str, Any], ops: Any) -> Decoder:
    """A decoder of random bf16 weights."""
    checkpoint = RandomCheckpoint(architecture, config)
    return load_decoder(checkpoint, ops, read_config(checkpoint))


def random_ids(config: Mapping[str, Any], count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(0, config["vocab_size"], count)]


def logits(model: Decoder, ids: list[int], single: int) -> np.ndarray:
    """Logits of a prefill of all but the last ``single`` tokens, then of those one at a time."""
    cache = model.cache(256)
    parts = [model.forward(Batch.extend([(cache, ids[:-single])]))]
    parts += [model.forward(Batch.extend([(cache, [token])])) for token in ids[-single:]]
    return np.concatenate(parts)


def largest_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference divided by largest magnitude."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
