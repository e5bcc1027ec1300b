"""A tree's rows, and a cache that keeps the accepted ones, have the bits of plain decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.offload.kv.cache import KvTier
from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import KV_FORMATS, CacheFormat
from localrt.quant.ops.protocol import Batch, Span
from localrt.speculative.tree import ROOT, TokenTree
from tests.models.tiny import load_ours, save_tiny, tokens
from tests.ops.cuda.conftest import emulator as emulator
from tests.speculative.test_tree import path_to

needs_kernels = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")

CAPACITY = 1024
# Two branches that part and part again: 0-1-2-3-8-9, 0-4-5, 6-7, and many leaves.
PARENTS = [ROOT, 0, 1, 2, 0, 4, ROOT, 6, 3, 8, *[5] * 9, 18, 19, 20]


# Within a block of the cache, at its end, and behind; of windows too.
HELD = [
    *(("gemma3", held) for held in (3, 239, 250, 255, 256, 505)),
    *((name, 250) for name in ("llama", "gemma2", "gemma4", "cohere2")),
]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, CacheFormat], Decoder]:
    """A tiny model by its name and the format of its cache, each loaded once."""

    @functools.cache
    def saved(name: str) -> Path:
        folder = tmp_path_factory.mktemp("tiny")
        save_tiny(name, folder)
        return folder

    @functools.cache
    def loaded(name: str, kv_format: CacheFormat) -> Decoder:
        return load_ours(saved(name), NativeOps(threads=2, kv_format=kv_format), context=CAPACITY)

    return loaded


def some_tree() -> TokenTree:
    ids = list(range(10, 10 + len(PARENTS)))
    return TokenTree.of(ids, PARENTS, [0.0] * len(ids), "test")


def tree_pass(decoder: Decoder, cache: Any, token: int, tree: TokenTree) -> Any:
    held = cache.length
    ids = np.concatenate([[token], tree.tokens])
    positions = np.concatenate([[held], tree.positions(held)])
    span = Span(cache, 1 + len(tree), tree.pass_mask())
    return decoder.forward(Batch(ids, positions, (span,)))


@needs_kernels
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("name", "held"), HELD)
def test_paths(load: Any, name: str, kv_format: CacheFormat, held: int) -> None:
    decoder, tree = load(name, kv_format), some_tree()
    prompt = tokens(held)
    cache = decoder.cache(CAPACITY)
    decoder.forward(Batch.extend([(cache, prompt)]), rows=[])
    logits = tree_pass(decoder, cache, 7, tree)
    for leaf in (7, 9, 14, 21):
        path = path_to(tree, leaf)
        alone = decoder.cache(CAPACITY)
        decoder.forward(Batch.extend([(alone, prompt)]), rows=[])
        for row, token in zip((ROOT, *path), (7, *tree.tokens[list(path)].tolist()), strict=True):
            (plain,) = decoder.forward(Batch.extend([(alone, [token])]))
            assert np.array_equal(logits[1 + row], plain)
    # What is kept of the tree has the bits as well: decoding goes on the same.
    cache.select(held, [0, *(1 + node for node in path)])
    assert cache.length == alone.length
    more = [decoder.forward(Batch.extend([(c, tokens(20, seed=5))])) for c in (cache, alone)]
    assert np.array_equal(*more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen2", folder)
    return folder


def scattered(decoder: Decoder, held: int, rows: list[int], count: int) -> Any:
    """A cache with ``count`` rows behind ``held``; those in ``rows`` stand in a row."""
    prompt, path = tokens(held), tokens(len(rows), seed=1)
    tree = decoder.cache(CAPACITY)
    decoder.forward(Batch.extend([(tree, prompt)]), rows=[])
    for row in range(count):
        token = path[rows.index(row)] if row in rows else 3
        position = rows.index(row) if row in rows else 0
        batch = Batch.extend([(tree, [token])])
        decoder.forward(Batch(batch.tokens, np.array([held + position]), batch.spans), rows=[])
    return tree


@needs_kernels
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("held", [250, 506])
def test_ssd_as_ram(folder: Path, tmp_path: Path, kv_format: Any, held: int) -> None:
    ram, ssd = (
        load_ours(folder, NativeOps(threads=1, kv_format=kv_format), context=CAPACITY)
        for _ in range(2)
    )
    specs = ssd.config.attention
    places: Any = ["ssd", "ram", "ssd"]
    tier = KvTier(specs, places, tmp_path, capacity=CAPACITY, kv_format=kv_format, slots=1)
    assert isinstance(ssd.ops, NativeOps)
    ssd.ops.kv_maker = tier
    results = []
    for decoder in (ram, ssd):
        tree = scattered(decoder, held, [1, 4, 7, 9, 11, 13, 14, 19], 20)
        tree.select(held, [1, 4, 7, 9, 11, 13, 14, 19])
        results.append(decoder.forward(Batch.extend([(tree, tokens(30, seed=3))])))
        tree.trim(held + 2)
        results.append(decoder.forward(Batch.extend([(tree, tokens(300, seed=4))]), rows=[299]))
    assert np.array_equal(results[0], results[2])
    assert np.array_equal(results[1], results[3])
    tier.close()
