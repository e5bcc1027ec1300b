"""The bytes of affine blocks: where each bit of a code lies."""

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

from localrt.quant.formats import AFFINE, Q4_0, Q4_1, AffineCodec, PackedTensor, pack, unpack


def random_weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((16, 256)).astype(np.float32)


@pytest.mark.parametrize(("name", "same"), [("int4-g32", Q4_0), ("int4-g32m", Q4_1)])
def test_int4_is_ggmls(name, same):
    packed = pack(random_weights(1), AFFINE[name].format)
    as_ggml = PackedTensor("w", same, packed.shape, packed.data)
    assert np.array_equal(unpack(packed), unpack(as_ggml))


def test_symmetric_scales_are_those_of_ggml():
    values = random_weights(2)
    ours = pack(values, AFFINE["int4-g32"].format)
    theirs = quantize(values, gguf.GGMLQuantizationType.Q4_0).reshape(ours.data.shape)
    assert np.array_equal(
        ours.data.reshape(-1, 18)[:, :2],
        theirs.reshape(-1, 18)[:, :2],
    )


@pytest.mark.parametrize("codec", AFFINE.values(), ids=AFFINE)
def test_each_code_has_its_place(codec: AffineCodec):
    half, header = codec.group // 2, 4 if codec.minimum else 2
    top = (1 << codec.bits) - 1
    scales = np.ones((1, 2 if codec.minimum else 1), np.float32)
    for at in (0, 1, half - 1, half, codec.group - 1):
        codes = np.zeros((1, codec.group), np.uint8)
        codes[0, at] = top
        body = codec.join(codes, scales)[0, header:]
        if codec.bits == 8:
            assert body[at] == 255
            assert body.sum() == 255
            continue
        assert body[at % half] == (15 if at < half else 240)
        high = body[half:]
        if codec.bits == 5:
            assert high[at // 8] == 1 << (at % 8)
        if codec.bits == 6:
            quarter = codec.group // 4
            assert high[at % quarter] == 3 << (2 * (at // quarter))
        assert np.count_nonzero(body) == (1 if codec.bits == 4 else 2)


def test_symmetric_extremes():
    for sign in (1, -1):
        values = np.linspace(-0.5, 0.5, 32, dtype=np.float32)[None] * 0.9
        values[0, 7] = sign * 2.0
        assert unpack(pack(values, AFFINE["int4-g32"].format))[0, 7] == sign * 2.0


def test_a_minimum_serves_groups_far_from_zero():
    values = (5 + np.linspace(0, 1, 64, dtype=np.float32))[None]
    plain = unpack(pack(values, AFFINE["int4-g64"].format))
    shifted = unpack(pack(values, AFFINE["int4-g64m"].format))
    assert np.abs(shifted - values).max() < 0.04
    assert np.abs(plain - values).max() > 0.2


def test_other_widths_and_groups_do_not_exist():
    with pytest.raises(ValueError, match="no affine format has 3 bits"):
        AffineCodec(3, 32, False)
