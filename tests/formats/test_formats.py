"""What every format promises, whatever the weights: bytes as published, and back to values."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from localrt.common.errors import CheckpointError, OptionError
from localrt.quant.formats import (
    AFFINE,
    BF16,
    CODECS,
    F16,
    F32,
    FORMATS,
    GGML_FORMATS,
    GGML_UNREAD,
    MXFP4,
    NF4,
    NVFP4,
    PUBLISHED,
    Q4_0,
    Q4_1,
    Q4_K,
    AffineCodec,
    Codec,
    Format,
    PackedTensor,
    codec_of,
    pack,
    unpack,
)
from localrt.quant.formats.convert import bf16_bits
from localrt.quant.formats.fp4 import E2M1, E4M3, NF4_LEVELS
from localrt.quant.formats.ggml import GGUF_CODECS
from tests.ops.packed import random_tensor

# Half the widest gap between neighbouring levels, over the group's largest magnitude (for a format
# with a minimum: over its range).
GAPS = {
    "int4": 1 / 8,  # the other end has one code less
    "int5": 1 / 16,
    "int6": 1 / 32,
    "int8": 1 / 128,
    "nf4": 0.16,
    "mxfp4": 0.26,  # what lies above 6 is clipped: 8 becomes 6
    "nvfp4": 0.18,
}
GGML = {name: gguf.GGMLQuantizationType[name.upper()] for name in GGUF_CODECS}
names = st.sampled_from(list(CODECS))
own = st.sampled_from([name for name in CODECS if name not in GGML])  # groups alone


def weights(name: str, seed: int, rows: int, groups: int, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (rows, groups * CODECS[name].format.block)
    values = rng.standard_normal(shape) * np.exp(spread * rng.standard_normal((rows, 1)))
    return values.astype(np.float32)


def gap(codec: Codec, values: np.ndarray) -> np.ndarray:
    """The largest error allowed in each group, (rows, groups, 1)."""
    groups = values.reshape(len(values), -1, codec.format.block).astype(np.float64)
    size = np.abs(groups).max(axis=-1, keepdims=True)
    base, _, tail = codec.format.name.partition("-")
    if tail.endswith("m"):
        span = groups.max(axis=-1, keepdims=True) - groups.min(axis=-1, keepdims=True)
        # The minimum is a half too: its rounding shifts the whole group.
        return span * GAPS[base] / 2 + size * 2**-10
    return size * (GAPS[base] + 2**-10)  # the scale is a half


@given(own, st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 5))
def test_round_trip(name, seed, rows, groups):
    codec, values = CODECS[name], weights(name, seed, rows, groups)
    packed = pack(values, codec.format, name="w")
    assert packed.data.shape == (rows, codec.format.row_bytes(values.shape[1]))
    once = unpack(packed)
    assert once.shape == values.shape
    assert once.dtype == np.float32
    error = np.abs(once - values).reshape(rows, groups, -1)
    assert (error <= gap(codec, values)).all()
    again = pack(once, codec.format, name="w", scale=packed.scale)
    assert np.array_equal(again.data, packed.data)


@given(
    names,
    arrays(
        np.float32,
        (2, 256),
        elements=st.floats(-1000, 1000, width=32)
        | st.sampled_from([0.0, -0.0, 2.0**-133, -(2.0**-100)]),
        fill=st.just(0.0),
    ),
)
def test_finite_values(name, values):
    packed = pack(values, CODECS[name].format)
    once = unpack(packed)
    assert np.isfinite(once).all()
    # An asymmetric or rounded scale may overshoot by less than one step.
    assert np.abs(once).max() <= np.abs(values).max() * 1.26 + 1e-6


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nan_is_refused(name, bad):
    values = weights(name, 1, 2, 1)
    values[1, 3] = bad
    with pytest.raises(CheckpointError, match=r"layer\.3: the weights hold NaN or infinity"):
        pack(values, CODECS[name].format, name="layer.3")


@given(st.sampled_from(sorted(GGML)), st.integers(0, 2**32 - 1))
def test_ggufs_own_package_reads_the_same(name, seed):
    values = weights(name, seed, 3, 2)
    packed = pack(values, CODECS[name].format)
    theirs = gguf.quants.dequantize(packed.data, GGML[name])
    np.testing.assert_array_equal(unpack(packed), theirs)
    error = np.abs(theirs - values).reshape(3, 2, -1, CODECS[name].group)
    steps = {"q2_k": 0.5, "q3_k": 0.3, "iq4_nl": 0.12}[name]
    assert (error <= steps * np.abs(values).reshape(3, 2, -1).max(axis=2)[:, :, None, None]).all()


@pytest.mark.parametrize("name", CODECS)
def test_a_code_is_the_nearest_one(name):
    codec = CODECS[name]
    groups = weights(name, 2, 4, 1).reshape(-1, codec.format.block)
    scales = codec.fit(groups)
    codes = codec.encode(groups, scales)
    error = np.abs(codec.decode(codes, scales) - groups)
    largest = int(codes.max())
    for code in range(largest + 1):
        other = np.abs(codec.decode(np.full_like(codes, code), scales) - groups)
        assert (error <= other + 1e-6 * np.abs(groups)).all()


@pytest.mark.parametrize("name", CODECS)
def test_take_rows(name):
    codec = CODECS[name]
    values = weights(name, 3, 700, 2)
    packed = pack(values, codec.format)
    order = np.array([650, 3, 3])
    assert np.array_equal(unpack(packed.take_rows(order)), unpack(packed)[order])
    alone = pack(values[650:651], codec.format, scale=packed.scale)
    assert np.array_equal(alone.data, packed.data[650:651])


def test_registry():
    assert set(FORMATS.values()) >= set(GGML_FORMATS.values())
    assert all(format_.name == name for name, format_ in FORMATS.items())
    assert len(CODECS) == 2 * 3 * 2 + 2 + 3 + len(GGUF_CODECS)
    assert not set(PUBLISHED) & set(CODECS)  # which are read and not quantized to
    for name, codec in (CODECS | PUBLISHED).items():
        assert codec.format.name == name
        assert FORMATS[name] == codec.format
        assert name in PUBLISHED or codec_of(codec.format) is codec
    bits = {"int4-g32": 4.5, "int4-g128m": 4.25, "int6-g32": 6.5, "nf4": 4.25, "mxfp4": 4.25}
    bits |= {"nvfp4": 4.5, "int4-g64b": 4.5, "int4-g128z": 4.3125, "e4m3-g128": 8.25}
    assert {name: FORMATS[name].bits_per_weight for name in bits} == bits


@pytest.mark.parametrize("format_", [F32, F16, BF16], ids=lambda f: f.name)
def test_plain_floats_round_to_nearest(format_):
    values = np.array([[1.0, -2.00390625, 3.14159, 0.0], [1e-3, 65504.0, -7.7, 0.1]], np.float32)
    packed = pack(values, format_)
    assert isinstance(packed, PackedTensor)
    step = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}[format_.name]
    assert (np.abs(unpack(packed) - values) <= np.abs(values) * step).all()
    assert np.array_equal(pack(unpack(packed), format_).data, packed.data)


def test_bf16_bits():
    """Ties to even, what is beyond becomes infinity, and NaN of any bits stays NaN."""
    given = np.array([0x3F808000, 0x3F818000, 0xBF808001, 0x7F7FFFFF, 0x7F800000, 0x7F800001])
    bits = bf16_bits(np.append(given, 0xFFFFFFFF).astype(np.uint32).view(np.float32))
    assert bits.tolist() == [0x3F80, 0x3F82, 0xBF81, 0x7F80, 0x7F80, 0x7FC0, 0x7FC0]


def random_weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((16, 256)).astype(np.float32)


@pytest.mark.parametrize(("name", "same"), [("int4-g32", Q4_0), ("int4-g32m", Q4_1)])
def test_int4_is_ggmls(name, same):
    packed = pack(random_weights(1), AFFINE[name].format)
    as_ggml = PackedTensor("w", same, packed.shape, packed.data)
    assert np.array_equal(unpack(packed), unpack(as_ggml))


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


def test_e4m3():
    exponent, fraction = np.divmod(np.arange(127), 8)
    normal = 2.0 ** (exponent - 7) * (1 + fraction / 8)
    positive = [*np.where(exponent, normal, 2.0**-6 * fraction / 8), np.nan]
    assert np.array_equal(E4M3, [*positive, *np.negative(positive)], equal_nan=True)


def test_every_level_packs_to_itself():
    fp4 = np.concatenate([E2M1, E2M1]).astype(np.float32)[None]
    assert np.array_equal(unpack(pack(fp4, MXFP4)), fp4)
    assert np.array_equal(unpack(pack(fp4, NVFP4, scale=1.0)), fp4)
    assert np.allclose(unpack(pack(fp4, NVFP4)), fp4, rtol=1e-6)
    nf4 = np.tile(NF4_LEVELS, 4)[None]
    assert np.array_equal(unpack(pack(nf4, NF4)), nf4)


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


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_codes_and_scales_survive(name: str) -> None:
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


def random_bytes(format_: Format, shape: tuple[int, ...]) -> PackedTensor:
    rows = shape[0] if len(shape) > 1 else 1
    row_bytes = format_.row_bytes(shape[-1]) * int(np.prod(shape[1:-1]))
    data = np.random.default_rng(7).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    return PackedTensor("t", format_, shape, data)


def by_gguf(tensor: PackedTensor, number: int) -> np.ndarray:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        rows = dequantize(tensor.data, gguf.GGMLQuantizationType(number))
    return rows.reshape(tensor.shape)


@pytest.mark.parametrize(("number", "format_"), GGML_FORMATS.items(), ids=lambda v: str(v))
def test_unpack_as_gguf(number, format_):
    # 67 rows: more than one piece, and not a multiple of anything
    tensor = random_bytes(format_, (67, 2048))
    ours, theirs = unpack(tensor), by_gguf(tensor, number)
    assert ours.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_every_type_of_gguf_can_be_placed():
    for kind in gguf.GGMLQuantizationType:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        known = GGML_FORMATS.get(kind) or GGML_UNREAD[kind]
        assert known == Format(kind.name.lower(), block, size)


def full(columns: int, value: float, rows: int = 1) -> np.ndarray:
    return np.full((rows, columns), value, np.float32)


@pytest.mark.parametrize(
    ("values", "format_", "message"),
    [
        (full(128, 1e30), CODECS["int4-g32"].format, "w: the weights are too large for the scales"),
        (full(2, 1e6), F16, "w: the weights are too large for f16"),
        (full(48, 0, 2), CODECS["int4-g32"].format, "w: 48 columns are not whole groups of 32"),
        (full(256, 0), Q4_K, "does not quantize to q4_k"),
        (full(256, 0), Format("nvfp4", 64, 36), "does not quantize to nvfp4"),  # ggml's own
    ],
)
def test_what_cannot_be_packed(values, format_, message):
    with pytest.raises(OptionError, match=message):
        pack(values, format_, name="w")


def test_what_cannot_be_unpacked():
    with pytest.raises(ValueError, match="t: 18 bytes do not hold"):
        unpack(PackedTensor("t", Q4_0, (2, 32), np.zeros((1, 18), np.uint8)))
    with pytest.raises(ValueError, match="no way to unpack format nf3"):
        unpack(PackedTensor("t", Format("nf3", 64, 26), (64,), np.zeros((1, 26), np.uint8)))
    with pytest.raises(ValueError, match="no affine format has 3 bits"):
        AffineCodec(3, 32, False)
