"""A tiny draft head with random weights, for a target of ``tests.conftest.write_tiny_model``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from localrt.drafts.head import target_identity
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.models.tokenizers import load_tokenizer
from localrt.speculative.draft_head_file import HeadConfig, write_head

DRAFT_VOCAB = 120


def tiny_config(target: Path, *, blocks: int = 2) -> HeadConfig:
    """Sizes of a head for the model at ``target``."""
    checkpoint = open_checkpoint(target)
    return HeadConfig(
        target=target_identity(read_config(checkpoint), load_tokenizer(checkpoint)),
        blocks=blocks,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        draft_vocab=DRAFT_VOCAB,
        window=64,
    )


def tiny_values(config: HeadConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights."""
    random = np.random.default_rng(seed)
    values = {}
    for name, shape in config.shapes().items():
        spread = 0.3 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        array = random.normal(size=shape) * spread + (1.0 if len(shape) == 1 else 0.0)
        values[name] = array.astype(np.float32)
    return values


def draft_tokens(config: HeadConfig) -> np.ndarray:
    """Some of the target's tokens, in rising order."""
    chosen = np.random.default_rng(1).permutation(config.target.vocab_size)[: config.draft_vocab]
    return np.sort(chosen).astype(np.int64)


def write_tiny_head(folder: Path, target: Path, *, blocks: int = 2) -> HeadConfig:
    """A head in ``folder``."""
    config = tiny_config(target, blocks=blocks)
    write_head(folder, config, draft_tokens(config), tiny_values(config))
    return config
