"""What every format that localrt packs itself promises, whatever the weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from localrt.common.errors import CheckpointError, OptionError
from localrt.quant.formats import (
    BF16,
    CODECS,
    F16,
    F32,
    FORMATS,
    GGML_FORMATS,
    Q4_K,
    Codec,
    Format,
    PackedTensor,
    codec_of,
    pack,
    unpack,
)
from localrt.quant.formats.convert import bf16_bits
from localrt.quant.formats.ggml import GGUF_CODECS

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
def test_zeros_stay_zeros(name):
    codec = CODECS[name]
    packed = pack(np.zeros((2, 256), np.float32), codec.format)
    assert not unpack(packed).any()


@pytest.mark.parametrize("name", CODECS)
def test_an_outlier_harms_its_own_group_only(name):
    codec = CODECS[name]
    values = weights(name, 5, 1, 4, spread=0.0)
    plain = unpack(pack(values, codec.format, scale=1.0))
    values[0, 0] = 300.0
    spoilt = unpack(pack(values, codec.format, scale=1.0))
    block = codec.format.block
    assert np.array_equal(spoilt[:, block:], plain[:, block:])
    assert abs(spoilt[0, 0] / 300 - 1) < 0.15


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_is_refused(name, bad):
    values = weights(name, 1, 2, 1)
    values[1, 3] = bad
    with pytest.raises(CheckpointError, match=r"layer\.3: the weights hold NaN or infinity"):
        pack(values, CODECS[name].format, name="layer.3")


@pytest.mark.parametrize("name", ["int4-g32", "int8-g32m", "nf4"])
def test_values_beyond_the_scales_are_refused(name):
    values = np.full((1, 128), 1e30, np.float32)
    with pytest.raises(OptionError, match="w: the weights are too large for the scales"):
        pack(values, CODECS[name].format, name="w")


@given(st.sampled_from(sorted(GGML)), st.integers(0, 2**32 - 1))
def test_ggufs_own_package_reads_the_same(name, seed):
    values = weights(name, seed, 3, 2)
    packed = pack(values, CODECS[name].format)
    theirs = gguf.quants.dequantize(packed.data, GGML[name])
    np.testing.assert_array_equal(unpack(packed), theirs)
    error = np.abs(theirs - values).reshape(3, 2, -1, CODECS[name].group)
    steps = {"q2_k": 0.5, "q3_k": 0.3, "iq4_nl": 0.12}[name]
    assert (error <= steps * np.abs(values).reshape(3, 2, -1).max(axis=2)[:, :, None, None]).all()


@given(names, st.integers(0, 2**32 - 1))
def test_codes_and_scales_survive_the_bytes(name, seed):
    codec = CODECS[name]
    groups = weights(name, seed, 3, 2).reshape(-1, codec.format.block)
    scales = codec.fit(groups)
    codes = codec.encode(groups, scales)
    read_codes, read_scales = codec.split(codec.join(codes, scales))
    assert np.array_equal(read_codes, codes)
    assert np.array_equal(read_scales, scales)
    assert np.array_equal(codec.encode(codec.decode(codes, scales), scales), codes)


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
    for name, codec in CODECS.items():
        assert codec.format.name == name
        assert FORMATS[name] == codec.format
        assert codec_of(codec.format) is codec
    assert CODECS["int4-g32"].format.bits_per_weight == 4.5
    assert CODECS["int4-g128m"].format.bits_per_weight == 4.25
    assert CODECS["int6-g32"].format.bits_per_weight == 6.5
    assert CODECS["nf4"].format.bits_per_weight == 4.25
    assert CODECS["mxfp4"].format.bits_per_weight == 4.25
    assert CODECS["nvfp4"].format.bits_per_weight == 4.5


def test_formats_that_are_only_read_are_refused():
    values = np.zeros((1, 256), np.float32)
    with pytest.raises(OptionError, match="does not quantize to q4_k"):
        pack(values, Q4_K)
    with pytest.raises(OptionError, match="does not quantize to nvfp4"):
        pack(values, Format("nvfp4", 64, 36))  # ggml's own


def test_rows_of_broken_groups_are_refused():
    with pytest.raises(OptionError, match="w: 48 columns are not whole groups of 32"):
        pack(np.zeros((2, 48), np.float32), CODECS["int4-g32"].format, name="w")


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


def test_plain_halves_that_overflow_are_refused():
    with pytest.raises(OptionError, match="w: the weights are too large for f16"):
        pack(np.full((1, 2), 1e6, np.float32), F16, name="w")
