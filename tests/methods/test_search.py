import numpy as np
import pytest

from localrt.quant.cpu.scales import fast_search
from localrt.quant.formats import CODECS, Codec
from localrt.quant.formats.ggml import GGUF_CODECS
from localrt.quant.methods.scales import ScaleSearch, best_scales
from tests.methods.data import weight


def loss(codec: Codec, groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    error = codec.decode(codec.encode(groups, scales), scales).astype(np.float64) - groups
    return (np.abs(error) ** 2.4).sum(axis=1)


@pytest.mark.parametrize("name", [name for name in CODECS if name not in GGUF_CODECS])
def test_best_scales(name: str) -> None:
    codec = CODECS[name]
    groups = weight(64, codec.format.block) * 20
    groups[::7, 3] *= 6  # outliers: clipping pays
    found = loss(codec, groups, best_scales(codec, groups))
    tried = [loss(codec, groups, codec.fit(groups, shrink)) for shrink in codec.shrinks]
    np.testing.assert_allclose(found, np.min(tried, axis=0), rtol=1e-3)
    assert (found <= loss(codec, groups, codec.fit(groups)) * 1.001).all()


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32m", "nf4", "mxfp4"])
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_the_size_of_weights_does_not_matter(name: str, size: float) -> None:
    codec = CODECS[name]
    groups = weight(16, codec.format.block)
    power = np.float32(2.0 ** np.round(np.log2(size)))
    scaled = best_scales(codec, groups * power)
    np.testing.assert_allclose(scaled, best_scales(codec, groups) * power, rtol=0.02)


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
