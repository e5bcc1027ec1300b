"""Recurrent layers: the kernels against the textbook, and bits that depend on the past alone."""

from __future__ import annotations

from itertools import accumulate, pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops import states
from localrt.quant.ops.hybrid_cache import HybridCache
from localrt.quant.reference.ops import TorchOps
from tests.conftest import needs_kernels
from tests.ops.layers import (
    SPECS,
    Layer,
    check_cancelled,
    check_sequences,
    random_rows,
    tree_mask,
)
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
