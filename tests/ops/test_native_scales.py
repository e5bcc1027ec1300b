"""The search for scales, in numpy and compiled: as good, and the same by every path and thread."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.scales import NativeSearch
from localrt.quant.formats import CODECS
from localrt.quant.formats.ggml import GGUF_CODECS
from localrt.quant.methods.scales import best_scales
from tests.conftest import needs_kernels
from tests.ops.test_native_matmul import ISAS

pytestmark = needs_kernels

COUNT = 300


@pytest.mark.parametrize(
    ("name", "important"),
    [*((name, False) for name in CODECS), *((name, True) for name in sorted(GGUF_CODECS))],
)
def test_it_finds_what_numpy_finds(name: str, important: bool) -> None:
    """By every instruction set and thread the same."""
    codec, block = CODECS[name], CODECS[name].format.block
    values = np.random.default_rng(7).standard_t(4, (COUNT * 256 // block, block)) * 0.02
    groups, times = values.astype(np.float32), np.ones((), np.float32)
    groups[3] = 0
    given_ = None
    if important:  # of each of 512 columns
        given_ = np.exp(np.random.default_rng(1).normal(size=512)).astype(np.float32)
        times = np.tile((given_ / given_.mean()).reshape(-1, block), (COUNT // 2, 1))
    expected = best_scales(codec, groups, given_)
    found = NativeSearch(NativeOps(threads=2))(codec, groups, given_)
    assert found.shape == expected.shape
    assert (found == expected).all(axis=1).mean() > 0.99

    def missed(scales: np.ndarray) -> float:
        """Squares of errors; for other formats than GGUF's |error|^2.4 over a group's size."""
        errors = codec.decode(codec.encode(groups, scales), scales).astype(np.float64) - groups
        if name in GGUF_CODECS:
            return float((times * np.square(errors)).sum())
        size = np.maximum(np.abs(groups).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return float((np.abs(errors / size) ** 2.4).sum())

    close = 1e-3 if name in GGUF_CODECS else 1e-4
    assert missed(found) == pytest.approx(missed(expected), rel=close)
    for isa, threads in product(ISAS, (1, 2)):
        search = NativeSearch(NativeOps(threads=threads, isa=isa))
        np.testing.assert_array_equal(search(codec, groups, given_), found)
