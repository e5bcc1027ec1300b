"""Keeping a tree's accepted rows: the cache is bitwise what it would be without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.offload.kv import KvTier
from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.kv import NativeKVCache
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv import KV_FORMATS
from localrt.quant.ops.protocol import Batch, Ops
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import save_tiny, tokens

CAPACITY = 1024
needs_kernels = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen2", folder)
    return folder


def load(folder: Path, ops: Ops) -> Decoder:
    with closing(open_checkpoint(folder)) as checkpoint:
        config = read_config(checkpoint, context=CAPACITY)
        return load_decoder(checkpoint, ops, config)


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


@pytest.fixture(scope="module", params=["torch", *KV_FORMATS, "ssd-bf16", "ssd-int4"])
def decoder(
    request: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Decoder]:
    kind: str = request.param
    if kind == "torch":
        yield load(folder, TorchOps(compute_format="f32", device="cpu"))
        return
    if find_library() is None:
        pytest.skip("the CPU kernels are not built")
    kv_format: Any = kind.removeprefix("ssd-")
    ops = NativeOps(threads=1, kv_format=kv_format)
    ours = load(folder, ops)
    if not kind.startswith("ssd-"):
        yield ours
        return
    places: Any = ["ssd", "ram", "ssd"]
    specs = ours.config.attention
    place = tmp_path_factory.mktemp("kv")
    tier = KvTier(specs, places, place, capacity=CAPACITY, kv_format=kv_format, slots=2)
    ops.kv_maker = tier
    yield ours
    tier.close()


@pytest.mark.parametrize("held", [20, 250, 255, 509])
@pytest.mark.parametrize("rows", [[0, 2, 5], [1, 2, 3, 17], [3], []])
def test_rows_lie_side_by_side_afterwards(decoder: Decoder, held: int, rows: list[int]) -> None:
    tree = scattered(decoder, held, rows, 20)
    chosen = [_row(tree, held + row) for row in rows]
    tree.select(held, rows)
    assert tree.length == held + len(rows)
    for i, before in enumerate(chosen):
        after = _row(tree, held + i)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    # It goes on from there.
    logits = decoder.forward(Batch.extend([(tree, [5])]))
    assert np.isfinite(logits).all()


def _row(cache: Any, token: int) -> list[Any]:
    """All that a cache in RAM keeps of a token."""
    if not isinstance(cache, NativeKVCache):
        return [t[:, token].numpy().copy() for t in (*cache._k, *cache._v)]
    from localrt.quant.cpu.kv import _place, _planes

    found, at = [], 0
    memory = cache._memory.reshape(-1, cache._step)
    for (groups, width), size in zip(cache._shapes, cache._blocks, strict=True):
        data = memory[:, at : at + size].reshape(len(memory), 1, size)
        for plane, tiled in _planes(data, groups, width, cache.kv_format):
            found.append(plane[_place(np.array([token]), tiled)].copy())
        at += size
    return found


@needs_kernels
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("held", [250, 506])
def test_the_ssd_gives_the_same_as_ram(
    folder: Path, tmp_path: Path, kv_format: Any, held: int
) -> None:
    ram, ssd = (load(folder, NativeOps(threads=1, kv_format=kv_format)) for _ in range(2))
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


def test_rows_must_ascend_and_be_held(folder: Path) -> None:
    decoder = load(folder, TorchOps(compute_format="f32", device="cpu"))
    cache = decoder.cache(64)
    decoder.forward(Batch.extend([(cache, tokens(10))]), rows=[])
    for first, rows in ((5, [1, 1]), (5, [2, 1]), (5, [5]), (5, [-1])):
        with pytest.raises(ValueError):
            cache.select(first, rows)
    assert cache.length == 10
