"""Keeping a tree's accepted rows: the cache is bitwise what it would be without the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.offload.kv.cache import KvTier
from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import load_ours, save_tiny, tokens

CAPACITY = 1024
needs_kernels = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")


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


def test_bad_rows(folder: Path) -> None:
    decoder = load_ours(folder)
    cache = decoder.cache(64)
    decoder.forward(Batch.extend([(cache, tokens(10))]), rows=[])
    for first, rows in ((5, [1, 1]), (5, [2, 1]), (5, [5]), (5, [-1])):
        with pytest.raises(ValueError):
            cache.select(first, rows)
    assert cache.length == 10
