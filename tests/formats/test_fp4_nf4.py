"""FP4 and NF4: their levels, and their scales against the specifications."""

import gguf
import numpy as np
import torch
from gguf.quants import quantize

from localrt.quant.formats import MXFP4, NF4, NVFP4, pack, unpack
from localrt.quant.formats.fp4 import E2M1, E4M3, NF4_LEVELS


def test_e4m3_is_what_torch_knows_as_float8():
    theirs = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3, theirs, equal_nan=True)


def test_every_level_packs_to_itself():
    fp4 = np.concatenate([E2M1, E2M1]).astype(np.float32)[None]
    assert np.array_equal(unpack(pack(fp4, MXFP4)), fp4)
    assert np.array_equal(unpack(pack(fp4, NVFP4, scale=1.0)), fp4)
    assert np.allclose(unpack(pack(fp4, NVFP4)), fp4, rtol=1e-6)
    nf4 = np.tile(NF4_LEVELS, 4)[None]
    assert np.array_equal(unpack(pack(nf4, NF4)), nf4)


def test_mxfp4_scales_are_those_of_ggml():
    values = np.random.default_rng(0).standard_normal((32, 128)).astype(np.float32)
    ours = pack(values, MXFP4).data.reshape(-1, 17)
    theirs = quantize(values, gguf.GGMLQuantizationType.MXFP4).reshape(-1, 17)
    assert np.array_equal(ours[:, 0], theirs[:, 0])


def test_mxfp4_range():
    for size in (1e-38, 1e-30, 1e30, 3e38):
        values = np.linspace(-1, 1, 32, dtype=np.float32)[None] * np.float32(size)
        error = np.abs(unpack(pack(values, MXFP4)).astype(np.float64) - values)
        assert error.max() < 0.26 * size


def test_nvfp4_covers_any_range_with_its_factor():
    rng = np.random.default_rng(1)
    for size in (1e-30, 1e-3, 1e30):
        values = (rng.standard_normal((4, 64)) * size).astype(np.float32)
        packed = pack(values, NVFP4)
        assert np.isclose(packed.scale, np.abs(values).max() / (6 * 448), rtol=1e-6)
        error = np.abs(unpack(packed).astype(np.float64) - values)
        assert error.max() < 0.18 * np.abs(values).max()


def test_shared_factor():
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((4, 64)).astype(np.float32) for _ in range(2))
    both = pack(np.concatenate([a, b * 4]), NVFP4)
    alone = pack(a, NVFP4, scale=both.scale)
    assert np.array_equal(alone.data, both.data[:4])
    assert alone.scale == both.scale
