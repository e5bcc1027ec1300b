"""The search for scales, in numpy and compiled: as good, and the same by every path and thread."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.scales import NativeSearch, fast_search
from localrt.quant.formats import CODECS, Codec
from localrt.quant.formats.ggml import GGUF_CODECS
from localrt.quant.methods.scales import ScaleSearch, best_scales
from tests.conftest import needs_kernels
from tests.ops.test_native_matmul import ISAS
from tests.quantize.test_methods import weight


@pytest.mark.parametrize("name", [name for name in CODECS if name not in GGUF_CODECS])
def test_best_scales(name: str) -> None:
    codec = CODECS[name]
    groups = weight(64, codec.format.block) * 20
    groups[::7, 3] *= 6  # outliers: clipping pays
    found = loss(codec, groups, best_scales(codec, groups))
    tried = [loss(codec, groups, codec.fit(groups, shrink)) for shrink in codec.shrinks]
    np.testing.assert_allclose(found, np.min(tried, axis=0), rtol=1e-3)
    assert (found <= loss(codec, groups, codec.fit(groups)) * 1.001).all()


@pytest.mark.parametrize("search", [best_scales, fast_search(2)])
@pytest.mark.parametrize("name", CODECS)
def test_groups_of_zeros_and_of_one_value(name: str, search: ScaleSearch) -> None:
    codec = CODECS[name]
    groups = np.zeros((3, codec.format.block), np.float32)
    groups[1] = 0.25
    groups[2, 5] = 1e-7
    scales = search(codec, groups)
    values = codec.decode(codec.encode(groups, scales), scales)
    assert not values[0].any()
    np.testing.assert_allclose(values[1], 0.25, rtol=0.05)
    assert np.abs(values[2]).max() <= 2e-7


pytestmark = needs_kernels

SEARCHED = [name for name in CODECS if name not in GGUF_CODECS]


def loss(codec: Codec, groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Sums of |error|^2.4 over the group's size, in float64."""
    values = codec.decode(codec.encode(groups, scales), scales).astype(np.float64)
    size = np.maximum(np.abs(groups).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return (np.abs((values - groups) / size) ** 2.4).sum(axis=1)


def heavy_tailed(count: int, block: int) -> np.ndarray:
    values = np.random.default_rng(7).standard_t(4, (count, block)) * 0.02
    return values.astype(np.float32)


@pytest.mark.parametrize("name", SEARCHED)
def test_it_finds_what_numpy_finds(name: str) -> None:
    """By every instruction set and thread the same."""
    codec = CODECS[name]
    groups = heavy_tailed(400, codec.format.block)
    expected = best_scales(codec, groups)
    found = NativeSearch(NativeOps(threads=2))(codec, groups)
    assert (found == expected).all(axis=1).mean() > 0.99
    total = loss(codec, groups, expected).sum()
    assert loss(codec, groups, found).sum() == pytest.approx(total, rel=1e-4)
    for isa, threads in product(ISAS, (1, 2)):
        search = NativeSearch(NativeOps(threads=threads, isa=isa))
        np.testing.assert_array_equal(search(codec, groups), found)


def weighted(codec: Codec, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups of rows of 512 columns, the columns' importance, and what errors count."""
    block = codec.format.block
    groups = heavy_tailed(count * 256 // block, block)
    groups[3] = 0
    importance = np.exp(np.random.default_rng(1).normal(size=512)).astype(np.float32)
    times = np.tile((importance / importance.mean()).reshape(-1, block), (count // 2, 1))
    return groups, importance, times


@pytest.mark.parametrize("name", sorted(GGUF_CODECS))
@pytest.mark.parametrize("important", [False, True])
def test_ggufs_blocks_are_searched_as_numpy_does(name: str, important: bool) -> None:
    codec = CODECS[name]
    groups, importance, times = weighted(codec, 300)
    given_, times = (importance, times) if important else (None, np.ones_like(times))
    expected = best_scales(codec, groups, given_)
    found = NativeSearch(NativeOps(threads=2))(codec, groups, given_)
    assert found.shape == expected.shape
    assert (found == expected).all(axis=1).mean() > 0.99

    def missed(scales: np.ndarray) -> float:
        errors = codec.decode(codec.encode(groups, scales), scales).astype(np.float64) - groups
        return float((times * np.square(errors)).sum())

    assert missed(found) == pytest.approx(missed(expected), rel=1e-3)
    for isa, threads in product(ISAS, (1, 2)):
        search = NativeSearch(NativeOps(threads=threads, isa=isa))
        np.testing.assert_array_equal(search(codec, groups, given_), found)
