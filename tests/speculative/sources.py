"""Sources of guesses for tests."""

from __future__ import annotations

from typing import Any

from localrt.speculative.drafter import ModelDrafter
from localrt.speculative.tree_source import TreeLimits, TreeSource
from tests.models.tiny import SIZES


def model_source(decoder: Any, *, held_rows: bool = True, **limits: Any) -> TreeSource:
    """Guesses of a tiny model: ``decoder`` has ``cache`` and ``forward``."""
    vocab = SIZES["vocab_size"]
    drafter = ModelDrafter(decoder.cache, decoder.forward, vocab, held_rows=held_rows)
    return TreeSource(drafter, TreeLimits(**{"capacity": 400, **limits}))
