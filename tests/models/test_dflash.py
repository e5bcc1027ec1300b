"""DFlash drafts: what plain torch makes of the same features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localrt.common.errors import CheckpointError, LocalrtError, UnsupportedModelError
from localrt.drafts.heads.dflash import BlockDecoder
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.opening import is_head
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.protocol import Batch, Span
from tests.models.test_heads import load_block
from tests.models.tiny import edited, load_ours, relative_error, save_tiny, tokens
from tests.models.tiny_dflash import BLOCK, MASK, TinyDFlash

IDS = tokens(14)


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("window", [8, 1 << 20])
def test_dflash(window: int, form: str, tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path)
    target = load_ours(tmp_path)
    width, known = target.config.hidden_size, len(IDS) - 1
    own = tmp_path / "own"
    tiny = TinyDFlash(own, width, target.config.vocab_size, window=window)
    if form == "gguf":
        own = tiny.save_gguf(tmp_path / "dflash.gguf")
    assert is_head(own)
    with pytest.raises(UnsupportedModelError, match="holds a DFlash draft of a model, which"):
        open_checkpoint(own)
    config, head = load_block(own, target)
    assert isinstance(head, BlockDecoder)
    assert (config.layers, config.block, config.mask) == ((1, 2, AFTER_LAST), BLOCK, MASK)
    features = Features(config.layers, np.empty((known, 3 * width), np.float32))
    target.forward(Batch.extend([(target.cache(32), IDS[:-1])]), rows=[], features=features)
    block = np.array([IDS[-1], *[MASK] * (BLOCK - 1)])
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor(block))
        theirs = tiny.expected(torch.tensor(features.rows), embedded, model.lm_head.weight)
    cache = head.cache(32)
    for start, stop in ((0, 5), (5, known)):
        batch = Batch.extend([(cache, IDS[start:stop])])
        head.context.forward(batch, rows=[], target_features=features.rows[start:stop])
    assert head.pairs is None
    for _ in range(2):  # a block leaves nothing behind
        span = Span(cache, BLOCK, np.ones((BLOCK, BLOCK), np.bool_))
        ours = head.forward(Batch(block, np.arange(known, known + BLOCK), (span,)))
        assert relative_error(ours, theirs) < 1e-4
        cache.trim(known)


NESTED = {
    "mask_token_id": MASK,
    "target_layer_ids": [0, 1, 2],
    "num_target_layers": 3,
    "projector_type": "dspark",
    "attention_mode": "gqa",
    "markov_rank": 24,
    "enable_confidence_head": True,
}
"""As Liquid's and SpecForge's configs."""

FORMS: dict[str, dict[str, Any]] = {
    "folder": {},
    "in pairs": {"in_pairs": True},
    "causal": {"is_causal": True, "window": 8},
    "bonus anchor": {"sample_from_anchor": False},
    "speculators": {"aux_hidden_state_layer_ids": [1, 2, 3], "target_layer_ids": None},
    "nested": {"dflash_config": NESTED, "target_layer_ids": None, "block_size": BLOCK},
    "dflash 2": {"choices": 9},
    "gguf": {},
    "gguf, dflash 2": {"choices": 9},
    "gguf, causal": {"is_causal": True},
    "gguf, bonus anchor": {"sample_from_anchor": False},
}


@pytest.mark.parametrize("form", FORMS)
def test_dspark(form: str, tmp_path: Path) -> None:
    """Logits of a block, and what they gain by the token before each."""
    model = save_tiny("llama", tmp_path)
    target, own, options = load_ours(tmp_path), tmp_path / "own", FORMS[form]
    width, vocab, known = target.config.hidden_size, target.config.vocab_size, len(IDS) - 1
    tiny = TinyDFlash(own, width, vocab, rank=24, **options)
    if form.startswith("gguf"):
        keys: dict[str, Any] = {"attention.causal": tiny.causal} | (
            {"sample_from_anchor": False} if "bonus" in form else {}
        )
        own = tiny.save_gguf(tmp_path / "dspark.gguf", **keys)
    config, head = load_block(own, target)
    assert isinstance(head, BlockDecoder)
    assert (config.layers, config.causal) == ((1, 2, AFTER_LAST), "causal" in form)
    assert config.first == (form == "speculators" or "bonus" in form or "2" in form)
    features = np.random.default_rng(2).normal(size=(known, 3 * width)).astype(np.float32)
    block = np.array([IDS[-1], *[MASK] * (BLOCK - 1)])
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor(block))
        theirs = tiny.expected(torch.tensor(features), embedded, model.lm_head.weight)
    cache, seen = head.cache(32), np.ones((BLOCK, BLOCK), np.bool_)
    batch = Batch.extend([(cache, IDS[:-1])])
    head.context.forward(batch, rows=[], target_features=features)
    span = Span(cache, BLOCK, np.tril(seen) if config.causal else seen)
    last = Features((AFTER_LAST,), np.empty((BLOCK, width), np.float32))
    ours = head.forward(Batch(block, np.arange(known, known + BLOCK), (span,)), features=last)
    assert relative_error(ours, theirs) < 1e-4
    before = [IDS[-1], 0, vocab - 1, 9, 9, 7]
    assert head.pairs is not None
    with head.ops.scope():
        changed = head.pairs.add(head.ops, ours, before, last.rows)
    with torch.no_grad():
        wanted = tiny.after(theirs, before, np.arange(BLOCK))
    kept = np.isfinite(wanted)
    assert np.array_equal(np.isfinite(changed), kept)
    assert kept.sum(1).tolist() == [options.get("choices", vocab)] * BLOCK
    assert relative_error(changed[kept], wanted[kept]) < 1e-4
    assert relative_error(changed[kept], theirs[kept]) > 0.1


@pytest.mark.parametrize(
    ("choices", "without", "said"),
    [
        (
            0,
            "markov_head.markov_w2.weight",
            "tensor markov_w1.weight is not part",
        ),
        (9, "candidate_selector.hidden_projection.weight", "base_kernel is not part"),
        (
            9,
            "layers.1.mlp_conv.base_kernel",
            "tensor model.layers.1.mlp_conv.base_kernel is missing",
        ),
        (
            9,
            "layers.0.attention_conv.kernel_projection.weight",
            "kernel_projection.weight is missing",
        ),
    ],
)
def test_missing_tensor(choices: int, without: str, said: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    target = load_ours(tmp_path)
    width, vocab = target.config.hidden_size, target.config.vocab_size
    tiny = TinyDFlash(tmp_path / "own", width, vocab, rank=24, choices=choices)
    del tiny.weights[without]
    with pytest.raises(LocalrtError, match=said):
        load_block(tiny.save_gguf(tmp_path / "dflash.gguf"), target)


def test_markov_head_of_other_tokens(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    target = load_ours(tmp_path)
    TinyDFlash(tmp_path / "own", target.config.hidden_size, target.config.vocab_size - 8, rank=24)
    with pytest.raises(CheckpointError, match=r"wrong shape: model.markov_head.markov_w2.weight"):
        load_block(tmp_path / "own", target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "hidden numbers"),
        ({"dflash_config": {"mask_token_id": 211, "target_layer_ids": [0]}}, "mask is token 211"),
        ({"dflash_config": {"mask_token_id": 7}}, "layers that it reads are None"),
        ({"dflash_config": {"anchors": 8}}, "with its anchors is not supported"),
        ({"markov_head_type": "gated"}, "with its markov_head_type is not supported"),
        ({"input_embedding_scale": 8.0}, "and embeddings times 8"),
    ],
)
def test_other_drafts(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    target = load_ours(tmp_path)
    TinyDFlash(tmp_path / "own", target.config.hidden_size, target.config.vocab_size)
    with pytest.raises(UnsupportedModelError, match=said):
        load_block(edited(tmp_path / "own", **changes), target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_layers": [0, 4]}, r"it reads layers \[-1, 3\], and the model has 3"),
        ({"target_layers": ["2"]}, r"the layers that it reads are \['2'\]"),
        ({"hyper_connection.count": 4}, "with its hyper_connection is not supported"),
        ({"embedding_scale": 8.0}, "and embeddings times 8"),
    ],
)
def test_other_drafts_in_gguf(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    target = load_ours(tmp_path)
    tiny = TinyDFlash(tmp_path / "own", target.config.hidden_size, target.config.vocab_size)
    with pytest.raises(UnsupportedModelError, match=said):
        load_block(tiny.save_gguf(tmp_path / "dflash.gguf", **changes), target)
