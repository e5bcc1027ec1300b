"""A tiny draft head with random weights, for a target of ``tests.conftest.write_tiny_model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from localrt.drafts.head import target_identity
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.models.tokenizers import load_tokenizer
from localrt.speculative.draft_head_file import HeadConfig, write_head

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "sliding_window": 64,
}


def head_values(target: str, vocab: int, *, guessed: int, **changes: Any) -> dict[str, Any]:
    """A config for a model of ``vocab`` tokens, of which ``guessed`` can be."""
    chosen = np.sort(np.random.default_rng(1).permutation(vocab)[:guessed]).tolist()
    return {**SIZES, "target": target, "vocab_size": vocab, "draft_tokens": chosen, **changes}


def random_weights(config: HeadConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of any size."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.shapes().items():
        spread = 0.3 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        array = random.normal(size=shape) * spread + (1.0 if len(shape) == 1 else 0.0)
        weights[name] = array.astype(np.float32)
    return weights


def write_random_head(folder: Path, values: dict[str, Any]) -> HeadConfig:
    """A head in ``folder`` with these values in its config."""
    config = HeadConfig.of(folder, values)
    write_head(folder, values, random_weights(config))
    return config


def write_tiny_head(folder: Path, target: Path, *, blocks: int = 2) -> HeadConfig:
    """A head in ``folder`` for the model at ``target``."""
    checkpoint = open_checkpoint(target)
    decoder = read_config(checkpoint)
    identity = target_identity(decoder, load_tokenizer(checkpoint))
    values = head_values(identity, decoder.vocab_size, guessed=120, num_hidden_layers=blocks)
    return write_random_head(folder, values)
