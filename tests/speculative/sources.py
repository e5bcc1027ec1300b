"""Draft sources for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from localrt.loading.draft_model import EngineDrafter
from localrt.speculative.tree_source import TreeSource
from tests.models.tiny import SIZES


def model_source(decoder: Any, *, held_rows: bool = True, **limits: Any) -> TreeSource:
    """Drafts of a tiny model: ``decoder`` has ``cache`` and ``forward``."""
    name = "native" if held_rows else "cuda"
    engine: Any = SimpleNamespace(cache=decoder.cache, run=decoder.forward, ops_name=name)
    return TreeSource(EngineDrafter(engine, SIZES["vocab_size"]), **{"capacity": 400, **limits})
