"""Recurrent layers: the kernels against the textbook, and bits that depend on the past alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops import states
from localrt.quant.ops.hybrid_cache import HybridCache, states_of
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.ops.states import StateCache, runs
from localrt.quant.reference.ops import TorchOps
from tests.conftest import needs_kernels
from tests.ops.layers import (
    SPECS,
    Layer,
    check_cancelled,
    check_sequences,
    check_tree,
    random_rows,
    tree_mask,
)
from tests.ops.oracles import read_in
from tests.ops.test_native_matmul import ISAS as HERE

ISAS = ["", *(isa for isa in ("portable", "avx2") if isa in HERE)]
ROWS = 40
LAYERS = st.sampled_from(sorted(SPECS))


@pytest.fixture(scope="module")
def native() -> dict[str, Layer]:
    return {name: Layer(name, NativeOps(threads=2)) for name in SPECS}


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", sorted(SPECS))
def test_kernels_give_what_torch_gives(name: str, isa: str) -> None:
    x, mask = random_rows(ROWS), tree_mask([-1, 0, 0, 2, 1, 3, 5, 0])
    both = Layer(name, NativeOps(threads=2, isa=isa)), Layer(name, TorchOps(compute_format="f32"))
    caches = [layer.cache() for layer in both]
    for part in ((x[:17],), (x[17:18],), (x[18:26], mask), (x[26:],)):
        found, wanted = (
            layer.run((cache, *part)) for layer, cache in zip(both, caches, strict=True)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)
        if len(part) == 2:
            for cache in caches:
                cache.select(18, [0, 2, 3, 5])


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["delta", "delta-channels", "ssm"])
def test_fast_decays_leave_nothing(name: str, isa: str) -> None:
    """A factor near the least float32 would make every product with it subnormal, and slow."""
    layer = Layer(name, NativeOps(threads=1, isa=isa))
    rates = layer.ops.vector(np.full(layer.spec.heads, -300, np.float32))
    layer.weights = replace(layer.weights, decay=rates)
    cache = layer.cache()
    layer.run((cache, random_rows(4)))
    kept = states_of(cache)._now.ring_of(0)[:4]
    decays = kept[:, layer.spec.channels : -layer.spec.heads]
    assert (decays == 0).any()
    assert not ((decays > 0) & (decays < 1e-20)).any()


@needs_kernels
@given(name=LAYERS, cuts=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_passes_of_any_size(native: dict[str, Layer], name: str, cuts: list[int]) -> None:
    layer, x = native[name], random_rows(sum(cuts))
    np.testing.assert_array_equal(read_in(layer, x, cuts), layer.run((layer.cache(), x)))


@needs_kernels
@given(
    name=LAYERS,
    held=st.integers(0, 12),
    parents=st.lists(st.integers(0, 99), min_size=1, max_size=9),
    first=st.integers(1, 9),
)
def test_tree(
    native: dict[str, Layer], name: str, held: int, parents: list[int], first: int
) -> None:
    check_tree(native[name], held, parents, first)


@needs_kernels
@pytest.mark.parametrize("name", sorted(SPECS))
def test_sequences_of_a_pass_do_not_meet(native: dict[str, Layer], name: str) -> None:
    check_sequences(native[name])


@needs_kernels
@pytest.mark.parametrize("name", sorted(SPECS))
def test_cancelled_pass(native: dict[str, Layer], name: str) -> None:
    check_cancelled(native[name])


@needs_kernels
@given(
    name=LAYERS,
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    back=st.integers(0, 30),
    saved=st.booleans(),
    apart=st.sampled_from([1, 8, 32]),
)
def test_trim(
    native: dict[str, Layer], name: str, cuts: list[int], back: int, saved: bool, apart: int
) -> None:
    """After a trim, and after states were saved and brought back into another cache."""
    layer, ends = native[name], list(accumulate(cuts, initial=0))
    x, cache = random_rows(ends[-1] + 3), layer.cache()
    with patch.object(states, "_KEEP_LEAST", apart):
        for start, stop in pairwise(ends):
            layer.run((cache, x[start:stop]))
    wanted = max(0, ends[-1] - back)
    if saved:
        assert isinstance(cache, HybridCache)
        parts, cache = cache.states.saved(), layer.cache()
        cache.reserve(wanted)
        held = cache.restore(wanted, parts)
    else:
        held = cache.trim(wanted)
    assert held == cache.length <= wanted
    # Where several tokens were read at once, their end is come back to, or a place so near.
    read = [stop for start, stop in pairwise(ends) if stop - start > 1 and stop <= wanted]
    assert held > max(read, default=0) - apart
    out = layer.run((cache, x[held:]))
    np.testing.assert_array_equal(out, layer.run((layer.cache(), x))[held:])


@needs_kernels
@given(
    name=LAYERS,
    begin=st.integers(0, 9),
    takes=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    back=st.integers(0, 20),
)
def test_draft_tree(
    native: dict[str, Layer], name: str, begin: int, takes: list[int], back: int
) -> None:
    """As a draft's: of a chain with wrong siblings, some tokens come true in each turn."""
    layer, end = native[name], begin + sum(takes)
    x, wrong = random_rows(end + 5), random_rows(1, seed=8)
    whole, cache, held = layer.run((layer.cache(), x)), layer.cache(), 0
    with patch.object(states, "_KEEP_EVERY", 3):
        if begin:
            layer.run((cache, x[:begin]))
        known = begin
        for count in takes:
            # The chain's nodes have odd numbers, each a wrong sibling before it.
            new = range(held, 2 * (count + 1))
            parents = [max(2 * (node // 2) - 1, -1) for node in range(2 * (count + 1))]
            if new:
                rows = np.concatenate(
                    [x[known + node // 2, None] if node % 2 else wrong for node in new]
                )
                out = layer.run((cache, rows, tree_mask(parents)[new.start :]))
                for node, found in zip(new, out, strict=True):
                    if node % 2:
                        np.testing.assert_array_equal(found, whole[known + node // 2])
            held = max(held, 2 * (count + 1))
            path = list(range(1, 2 * count, 2))
            below = list(range(2 * count, held))
            cache.select(known, [*path, *below])
            known, held = known + count, len(below)
        cache.trim(known)
        wanted = max(0, known - back)
        kept = cache.trim(wanted)
        assert kept <= wanted
        np.testing.assert_array_equal(layer.run((cache, x[kept:])), whole[kept:])


@given(ends=st.lists(st.integers(1, 40), min_size=1, max_size=4), turn=st.integers(1, 511))
def test_changed_turn(ends: list[int], turn: int) -> None:
    """Also where a state is so large that few are kept: Granite-4-H-Tiny's takes 57 MB."""
    spec = RecurrentSpec(
        kind="ssm", heads=48, key_heads=1, key_size=128, value_size=64, taps=4, eps=1e-6
    )
    cache = StateCache([spec] * 36, 1 << 20, lambda size: np.zeros(size, np.float32))
    assert cache.layout.kept == 4
    for chunks in ends:
        for _ in range(chunks):
            cache.begin(512, None)
            for layer in range(36):
                cache.layer_done(layer)
            cache.advance(512)
        length = cache.length
        changed = max(0, length - turn)
        assert cache.trim(changed) >= changed - 512


@given(ring=st.integers(1, 12), other=st.integers(1, 12), first=st.integers(0, 30), data=st.data())
def test_runs(ring: int, other: int, first: int, data: st.DataObject) -> None:
    """Rings of two sizes: slices name the same rows, and end only where a ring does."""
    tokens = np.arange(first, first + data.draw(st.integers(0, min(ring, other))))
    found = runs(tokens % ring, tokens % other)
    for place, size in enumerate((ring, other)):
        rows = [row for slices in found for row in range(size)[slices[place]]]
        assert rows == (tokens % size).tolist()
    assert len(found) <= 3
