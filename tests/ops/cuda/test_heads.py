"""Draft heads on the CUDA kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localrt.drafts.heads.dflash import BlockDecoder
from localrt.models.decoder import FinalNorm
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.arrays import Features
from localrt.quant.ops.protocol import Batch, Span
from tests.models.test_heads import IDS, load_block
from tests.models.tiny import load_ours, relative_error, save_tiny
from tests.models.tiny_heads import BLOCK, TinyBlock, TinyDFlash, TinyEagle3
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE

EAGLE3 = ("", "norm_before_fc", "norm_before_residual")
"""The flags of EAGLE-3 heads."""


@pytest.mark.parametrize("kind", ["qwen3.5", "glm4-moe", *EAGLE3])
def test_head(kind: str, tmp_path: Path, emulator: Emulator) -> None:
    """Against the reference, from the same features."""
    own = tmp_path
    if kind in EAGLE3:
        own = tmp_path / "head"
        own.mkdir()
        config = save_tiny("llama", tmp_path).config
        flags = {kind: True} if kind else {}
        TinyEagle3(own, config.hidden_size, config.vocab_size, **flags)
    else:
        TinyBlock(kind, tmp_path)
    plain, ours = load_ours(tmp_path), load_ours(tmp_path, CudaOps(device=str(DEVICE)), context=256)
    config, _ = head = load_block(own, plain)
    shape = (len(IDS), len(config.layers) * plain.config.hidden_size)
    features = Features(config.layers, np.empty(shape, np.float32))
    plain.forward(Batch.extend([(plain.cache(32), IDS)]), rows=[], features=features)
    given = FinalNorm(plain)(features.rows) if config.normed else features.rows
    found = []
    for decoder in (head[1], load_block(own, ours)[1]):
        span = Span(decoder.cache(32), len(IDS) - 1)
        batch = Batch(np.array(IDS[1:]), np.arange(1, len(IDS)), (span,))
        found.append(decoder.forward(batch, target_features=given[:-1]))
    assert relative_error(found[1], found[0]) < 0.03


@pytest.mark.parametrize(("rank", "choices"), [(0, 0), (32, 0), (32, 9)])
def test_dflash(rank: int, choices: int, tmp_path: Path, emulator: Emulator) -> None:
    """A block behind the context, whose rows see each other, and what the token before adds."""
    config = save_tiny("llama", tmp_path).config
    TinyDFlash(tmp_path / "own", config.hidden_size, config.vocab_size, rank=rank, choices=choices)
    plain, ours = load_ours(tmp_path), load_ours(tmp_path, CudaOps(device=str(DEVICE)), context=256)
    given = np.random.default_rng(1).standard_normal((9, 3 * config.hidden_size), np.float32)
    found = []
    for target in (plain, ours):
        _, head = load_block(tmp_path / "own", target)
        assert isinstance(head, BlockDecoder)
        cache = head.cache(32)
        head.context.forward(Batch.extend([(cache, IDS[:9])]), rows=[], target_features=given)
        span = Span(cache, BLOCK, np.ones((BLOCK, BLOCK), np.bool_))
        batch = Batch(np.array(IDS[:BLOCK]), np.arange(9, 9 + BLOCK), (span,))
        found.append(head.forward(batch))
        if head.pairs is not None:
            with head.ops.scope():
                found[-1] = head.pairs.add(
                    head.ops, found[-1], IDS[:BLOCK], given[:BLOCK, : config.hidden_size]
                )
    both = np.isfinite(found[0]) & np.isfinite(found[1])  # those chosen by either's roundings
    assert both.sum() > 0.8 * np.isfinite(found[0]).sum()
    assert relative_error(found[1][both], found[0][both]) < 0.03
