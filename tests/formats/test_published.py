"""Groups as others publish them: where their bytes lie, and what they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from localrt.quant.formats import CODECS, FORMATS, PUBLISHED
from localrt.quant.formats.fp4 import E4M3, NF4_LEVELS
from tests.ops.packed import random_tensor


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("name", PUBLISHED)
def test_codes_and_scales_survive_the_bytes(name: str) -> None:
    codec = PUBLISHED[name]
    blocks = random_tensor(name, 8, 256).data.reshape(-1, codec.format.block_bytes)
    codes, scales = codec.split(blocks)
    assert codes.shape == (len(blocks), codec.format.block)
    assert np.array_equal(codec.join(codes, scales), blocks)


def test_a_block_is_what_its_format_says() -> None:
    scale, other = np.float32(0.0123), np.float32(-0.0456)
    codes = np.random.default_rng(0).integers(0, 16, (1, 64), np.uint8)
    brains = PUBLISHED["int4-g64b"]
    pair = bf16(np.array([[scale, other]]))
    blocks = brains.join(codes, pair)
    assert blocks[0, :4].tobytes() == (pair.view(np.uint32) >> 16).astype("<u2").tobytes()
    assert np.array_equal(brains.decode(*brains.split(blocks)), codes * pair[0, 0] + pair[0, 1])
    zeros = PUBLISHED["int4-g64z"]
    blocks = zeros.join(codes, np.array([[scale, 11]], np.float32))
    assert (blocks[0, :4].view("<f4")[0], blocks[0, 4]) == (scale, 11)
    assert np.array_equal(zeros.decode(*zeros.split(blocks)), scale * (codes.astype("f4") - 11))
    nf4 = PUBLISHED["nf4-f32"]
    blocks = nf4.join(codes, np.array([[scale]]))
    assert np.array_equal(nf4.decode(*nf4.split(blocks)), NF4_LEVELS[codes] * scale)
    e4m3 = PUBLISHED["e4m3-g64"]
    blocks = e4m3.join(codes, np.array([[scale]]))
    assert np.array_equal(e4m3.decode(*e4m3.split(blocks)), E4M3[codes] * scale)


def test_they_are_read_and_not_quantized_to() -> None:
    assert not set(PUBLISHED) & set(CODECS)
    for name, codec in PUBLISHED.items():
        assert FORMATS[name] == codec.format
    assert PUBLISHED["int4-g64b"].format.bits_per_weight == 4.5
    assert PUBLISHED["int4-g128z"].format.bits_per_weight == 4.3125
    assert PUBLISHED["e4m3-g128"].format.bits_per_weight == 8.25
