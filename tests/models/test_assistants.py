"""Gemma 4's assistants, which read the target's keys and values, and transformers' of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.opening import is_head
from localrt.models.decoder import FinalNorm
from localrt.quant.ops.arrays import AFTER_LAST, CARRIED, Features
from localrt.quant.ops.protocol import Batch, Span
from tests.models.make_gguf import write_tiny_gguf
from tests.models.test_heads import load_block
from tests.models.tiny import edited, load_ours, relative_error, save_tiny, tokens
from tests.models.tiny_assistants import CLUSTERS, TinyAssistant

IDS = tokens(24)  # more than the window
KINDS = [
    ("gemma4", {}),
    ("gemma4-double-wide", {"use_ordered_embeddings": True}),
    ("gemma4-unified", {}),
    ("gemma4-unified-whole", {"use_ordered_embeddings": True}),
]


@pytest.mark.parametrize(("name", "options"), KINDS)
@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("held", [5, 23])
def test_assistant(
    name: str, options: dict[str, Any], held: int, form: str, tmp_path: Path
) -> None:
    clusters = CLUSTERS
    if form == "gguf":  # which does not say how many clusters get logits
        clusters = {**CLUSTERS, "centroid_intermediate_top_k": 32}
    tiny = TinyAssistant(name, tmp_path / "target", tmp_path / "own", **options, **clusters)
    ids, drafts = IDS[: held + 1], [9, 4, 140]
    theirs = tiny.levels(ids, drafts)
    target = load_ours(tmp_path / "target")
    own = tmp_path / "own"
    if form == "gguf":
        own = write_tiny_gguf(own, tmp_path / "assistant.gguf", "gemma4-assistant")
    assert is_head(own)
    with pytest.raises(UnsupportedModelError, match="holds an assistant of a model, which"):
        open_checkpoint(own)
    config, head = load_block(own, target)
    width = target.config.hidden_size
    seen = Features(config.layers, np.empty((held, width), np.float32))
    cache = target.cache(64)
    target.forward(Batch.extend([(cache, ids[:-1])]), rows=[], features=seen)
    given = FinalNorm(target)(seen.rows[-1:])
    cache.trim(held - 1)
    for token, expected in zip((ids[-1], *drafts), theirs, strict=True):
        span = Span(cache, 1, np.ones((1, 1), np.bool_))
        batch = Batch(np.array([token]), np.array([held]), (span,))
        made = Features((CARRIED,), np.empty((1, width), np.float32))
        logits = head.forward(batch, target_features=given, features=made)
        cache.trim(held - 1)
        given = made.rows
        assert relative_error(logits[0], expected) < 1e-4


def test_another_models_assistant(tmp_path: Path) -> None:
    TinyAssistant(*KINDS[1][:1], tmp_path / "target", tmp_path / "own", **KINDS[1][1], **CLUSTERS)
    target, other = load_ours(tmp_path / "target"), tmp_path / "llama"
    assert load_block(tmp_path / "own", target)[0].layers == (AFTER_LAST,)
    save_tiny("llama", other)
    with pytest.raises(UnsupportedModelError, match="do not fit the model's keys and values"):
        load_block(tmp_path / "own", load_ours(other))
    with pytest.raises(UnsupportedModelError, match="211 tokens do not fill 7 clusters"):
        load_block(edited(tmp_path / "own", num_centroids=7), target)
    own = edited(tmp_path / "own", num_centroids=211, backbone_hidden_size=32)
    with pytest.raises(UnsupportedModelError, match="it has 32 hidden numbers and the model 64"):
        load_block(own, target)
