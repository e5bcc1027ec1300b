"""Sequences of one model in turn, with trees and batches: the bits of each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.protocol import Batch, Span
from tests.conftest import needs_kernels
from tests.models.tiny import load_ours, tokens

pytestmark = needs_kernels

CAPACITY = 40
TREE = np.tril(np.ones((3, 3), np.bool_))
TREE[2, 1] = False  # two children of one token


def conversation(decoder: Decoder, seed: int) -> Iterator[np.ndarray]:
    """The logits of a prompt, decode steps and trees of one sequence."""
    cache = decoder.cache(CAPACITY)
    yield decoder.forward(Batch.extend([(cache, tokens(5 + seed, seed=seed))]))
    for turn in range(3):
        yield decoder.forward(Batch.extend([(cache, tokens(1, seed=turn))]))
        tree = Batch.extend([(cache, tokens(3, seed=turn))])
        span = Span(cache, 3, TREE)
        yield decoder.forward(Batch(tree.tokens, tree.positions - [0, 0, 1], (span,)))
        cache.select(cache.length - 3, [0, 2])


KINDS = (
    "qwen2",
    "gemma2",
    "granite",
    "ministral3",
    "qwen3.5",
    "falcon-h1",
    "deepseek-v3",
)


@pytest.mark.parametrize(
    ("name", "kv_format"), [("qwen2", "int8"), *((name, "bf16") for name in KINDS)]
)
def test_turns(name: str, kv_format: Any, tiny: Callable[[str], tuple[Path, Any]]) -> None:
    decoder = load_ours(tiny(name)[0], NativeOps(threads=2, kv_format=kv_format), context=CAPACITY)
    alone = [list(conversation(decoder, seed)) for seed in (0, 1)]
    in_turn = zip(conversation(decoder, 0), conversation(decoder, 1), strict=True)
    for now, before in zip(in_turn, zip(*alone, strict=True), strict=True):
        for ours, theirs in zip(now, before, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", KINDS)
def test_batches(name: str, tiny: Callable[[str], tuple[Path, Any]]) -> None:
    decoder = load_ours(tiny(name)[0], NativeOps(threads=2), context=CAPACITY)
    both, each = ([decoder.cache(CAPACITY) for _ in range(2)] for _ in range(2))
    for count in (7, 4, 1, 2):
        parts = [tokens(count + place, seed=place) for place in range(2)]
        joint = decoder.forward(Batch.extend(list(zip(both, parts, strict=True))))
        single = [decoder.forward(Batch.extend([part])) for part in zip(each, parts, strict=True)]
        np.testing.assert_array_equal(joint, np.concatenate(single))
