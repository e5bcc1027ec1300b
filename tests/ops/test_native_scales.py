"""The compiled search for scales: as good as numpy's, the same by every code path and thread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.scales import NativeSearch, fast_search
from localrt.quant.formats import CODECS, Codec
from localrt.quant.formats.ggml import GGUF_CODECS
from localrt.quant.methods import best_scales, quantize
from tests.conftest import needs_kernels
from tests.ops.test_native_matmul import ISAS

pytestmark = needs_kernels

SEARCHED = [name for name in CODECS if name not in GGUF_CODECS]
EVEN = [name for name in SEARCHED if not name.endswith("m")]


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
    codec = CODECS[name]
    groups = heavy_tailed(500, codec.format.block)
    expected = best_scales(codec, groups)
    found = NativeSearch(NativeOps(threads=2))(codec, groups)
    assert (found == expected).all(axis=1).mean() > 0.99
    total = loss(codec, groups, expected).sum()
    assert loss(codec, groups, found).sum() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("name", SEARCHED)
def test_scales_by_instruction_set(name: str) -> None:
    codec = CODECS[name]
    groups = heavy_tailed(300, codec.format.block)
    found = [
        NativeSearch(NativeOps(threads=threads, isa=isa))(codec, groups)
        for isa in ISAS
        for threads in (1, 2)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


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
    ways = [(isa, threads) for isa in ISAS for threads in (1, 2)]
    for isa, threads in ways:
        search = NativeSearch(NativeOps(threads=threads, isa=isa))
        np.testing.assert_array_equal(search(codec, groups, given_), found)


@given(
    st.sampled_from(EVEN),
    arrays(
        np.float32,
        (3, 128),
        elements=st.one_of(
            st.floats(-4, 4, width=32),
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.sampled_from([0.0, 1e-45, -1e-40, 6e-8, 65504.0, 3e38, -3e38]),
        ),
    ),
)
def test_no_group_loses_more_than_with_numpys(name: str, values: np.ndarray) -> None:
    codec = CODECS[name]
    groups = values.reshape(-1, codec.format.block)
    found = NativeSearch(NativeOps(threads=1))(codec, groups)
    expected = best_scales(codec, groups)
    fits = np.isfinite(expected).all(axis=1)
    np.testing.assert_array_equal(np.isfinite(found).all(axis=1), fits)
    with np.errstate(over="ignore"):
        least = loss(codec, groups[fits], expected[fits])
        assert (loss(codec, groups[fits], found[fits]) <= least * 1.001 + 1e-6).all()


def test_a_weight_is_quantized_with_it() -> None:
    values = heavy_tailed(8, 256)
    codec = CODECS["nvfp4"]
    tensor = quantize(values, codec.format, search=fast_search()).tensor
    np.testing.assert_array_equal(tensor.data, quantize(values, codec.format).tensor.data)
