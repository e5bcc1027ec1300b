"""Draft sources for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from localrt.drafts.model_draft import EngineDrafter
from localrt.speculative.tree_source import TreeSource
from tests.models.tiny import SIZES


def model_source(decoder: Any, **limits: Any) -> TreeSource:
    """Drafts of a tiny model: ``decoder`` has ``cache`` and ``forward``."""
    engine: Any = SimpleNamespace(cache=decoder.cache, run=decoder.forward)
    return TreeSource(EngineDrafter(engine, SIZES["vocab_size"]), **{"capacity": 400, **limits})
