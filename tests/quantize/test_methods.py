"""Methods of quantizing: which a format gets, rotations, GPTQ against the textbook, errors."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy.linalg import hadamard

from localrt.common.errors import CheckpointError, LocalrtError, OptionError
from localrt.quant.formats import AFFINE, CODECS, F16, MXFP4, Codec, pack, unpack
from localrt.quant.methods import (
    METHODS,
    HessianSum,
    block_hadamard,
    fitting_format,
    quantize,
    quantized_format,
    restore,
    rotation,
)
from localrt.quant.methods.gptq import gptq_codes
from localrt.quant.methods.scales import best_scales


def weight(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 0.05
    return values.astype(np.float32)


def activations(count: int, columns: int, seed: int = 1) -> np.ndarray:
    return _activations(count, columns, seed).copy()


@cache
def _activations(count: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns, columns)) * np.exp(rng.standard_normal(columns))
    return (rng.standard_normal((count, columns)) @ mix / columns**0.5).astype(np.float32)


def hessian_of(inputs: np.ndarray) -> np.ndarray:
    total = HessianSum(inputs.shape[1])
    total.add(inputs)
    return total.matrix()


def output_error(inputs: np.ndarray, values: np.ndarray, rounded: np.ndarray) -> float:
    """|X (W - Q)^T|, relative."""
    wrong = inputs @ (values - rounded).T
    return float(np.linalg.norm(wrong) / np.linalg.norm(inputs @ values.T))


@pytest.mark.parametrize(
    ("name", "columns", "fitting"),
    [
        ("int4-g128", 576, "int4-g64"),
        ("nf4", 96, "int4-g32"),
        ("nvfp4", 48, "bf16"),  # sixteen columns more than the kernels' 32
        ("int8-g64m", 96, "int8-g32m"),
        ("bf16", 7, "bf16"),
    ],
)
def test_fitting_format(name: str, columns: int, fitting: str) -> None:
    assert fitting_format(quantized_format(name), columns).name == fitting


def test_block_rotation() -> None:
    values = np.random.default_rng(0).standard_normal((3, 96)).astype(np.float32)
    before = values.copy()
    rotated = block_hadamard(values, 32)
    assert np.array_equal(values, before)
    expected = values.reshape(3, 3, 32) @ hadamard(32).astype(np.float32) / np.float32(32**0.5)
    np.testing.assert_allclose(rotated, expected.reshape(3, 96), atol=1e-5)
    np.testing.assert_allclose(block_hadamard(rotated, 32), values, atol=1e-6)


INT4 = AFFINE["int4-g32"].format


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CODECS)
def test_every_method_serves_every_format(name: str, method: str) -> None:
    values, inputs = weight(24, 256), activations(256, 256)
    hessian = hessian_of(inputs)
    found = quantize(values, CODECS[name].format, method=method, hessian=hessian, name="w")
    tensor = found.tensor
    assert (tensor.name, tensor.format, tensor.shape) == ("w", CODECS[name].format, (24, 256))
    assert found.hadamard == (rotation(tensor.format) if method == "mr-gptq" else 0)
    plain = output_error(inputs, values, unpack(pack(values, tensor.format)))
    # The search looks at weights, not at outputs, so that it may lose a little of the latter.
    assert output_error(inputs, values, restore(found)) < plain * (1.2 if method == "rtn" else 1)
    again = quantize(values, tensor.format, method=method, hessian=hessian, name="w")
    assert np.array_equal(again.tensor.data, tensor.data)


def naive_gptq(
    values: np.ndarray, scales: np.ndarray, codec: Codec, hessian: np.ndarray
) -> np.ndarray:
    """The textbook loop in float64: invert H, remove a column from it after each step."""
    work = values.astype(np.float64)
    columns = work.shape[1]
    damped = hessian.astype(np.float64)
    damped[np.diag_indices(columns)] += 0.01 * np.diagonal(hessian).astype(np.float64).mean()
    codes = np.zeros(work.shape, np.uint8)
    inverse = np.linalg.inv(damped)
    for column in range(columns):
        scale = scales[:, column // codec.format.block]
        code = codec.encode(work[:, column : column + 1].astype(np.float32), scale)
        codes[:, column] = code[:, 0]
        error = work[:, column] - codec.decode(code, scale)[:, 0]
        later = slice(column + 1, columns)
        work[:, later] -= np.outer(error / inverse[0, 0], inverse[0, 1:])
        inverse = (inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    return codes


@pytest.mark.parametrize("name", ["int4-g32m", "nvfp4"])
def test_the_blocked_loop_is_the_textbooks(name: str) -> None:
    codec, columns = CODECS[name], 160
    values, inputs = weight(8, columns) * 20, activations(400, columns)
    # Falling diagonal: the order of columns is the natural one.
    inputs = inputs[:, np.argsort(-(inputs**2).sum(axis=0))]
    hessian = hessian_of(inputs)
    groups = values.reshape(-1, codec.format.block)
    scales = best_scales(codec, groups)
    by_row = scales.reshape(8, -1, scales.shape[1])
    ours = gptq_codes(values, by_row, codec, hessian)
    textbook = naive_gptq(values, by_row, codec, hessian)
    # A value half-way between two codes may fall to either side in float32.
    assert (ours != textbook).mean() < 0.02


def test_inactive_inputs() -> None:
    values, inputs = weight(16, 64), activations(400, 64)
    inputs[:, 10] = 0
    hessian = hessian_of(inputs)
    found = restore(quantize(values, INT4, method="gptq", hessian=hessian))
    rounded = restore(quantize(values, INT4))
    assert np.array_equal(found[:, 10], rounded[:, 10])
    nothing = quantize(values, INT4, method="gptq", hessian=np.zeros((64, 64), np.float32))
    assert np.array_equal(restore(nothing), rounded)


def test_bad_arguments() -> None:
    values = weight(4, 64)
    hessian = np.eye(64, dtype=np.float32)
    with pytest.raises(OptionError, match="method must be one of rtn, gptq, mr-gptq, is 'awq'"):
        quantize(values, INT4, method="awq")
    with pytest.raises(OptionError, match="gptq needs calibration text"):
        quantize(values, INT4, method="gptq")
    with pytest.raises(OptionError, match="does not quantize to f16"):
        quantize(values, F16)
    with pytest.raises(OptionError, match="w: 48 columns are not whole groups"):
        quantize(weight(4, 48), MXFP4, name="w")
    hessian[3, 5] = np.nan
    for method in ("gptq", "mr-gptq"):
        with pytest.raises(LocalrtError, match="w: the calibration activations hold NaN"):
            quantize(values, INT4, method=method, hessian=hessian, name="w")
    values[1, 1] = np.inf
    with pytest.raises(CheckpointError, match="w: the weights hold NaN or infinity"):
        quantize(values, INT4, name="w")


def test_bad_hessian() -> None:
    hessian = -np.eye(64, dtype=np.float32)
    hessian[0, 0] = 65
    with pytest.raises(LocalrtError, match="w: the calibration statistics are not positive"):
        quantize(weight(4, 64), INT4, method="gptq", hessian=hessian, name="w")


@pytest.mark.parametrize(("name", "ratio"), [("q3_k", 0.85), ("q2_k", 0.75), ("iq4_nl", 0.85)])
def test_gguf_scales(name: str, ratio: float) -> None:
    values, inputs = weight(32, 512), activations(1024, 512)
    format_ = CODECS[name].format
    rounded = output_error(inputs, values, unpack(pack(values, format_)))
    searched = output_error(inputs, values, restore(quantize(values, format_)))
    found = quantize(values, format_, method="gptq", hessian=hessian_of(inputs))
    assert searched < rounded
    assert output_error(inputs, values, restore(found)) < ratio * searched


def test_shrinkage() -> None:
    """Less error on other inputs than where the statistics are taken as they are."""
    columns = 256
    mixing = np.random.default_rng(0).normal(size=(64, columns)).astype(np.float32)

    def inputs(rows: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        common, own = rng.normal(size=(rows, 64)) @ mixing, rng.normal(size=(rows, columns))
        return (common + 4 * own).astype(np.float32)

    values, others = weight(64, columns), inputs(4096, 2)
    for rows, gain in ((160, 0.85), (320, 0.95), (8192, 1.01)):
        total = HessianSum(columns)
        total.add(inputs(rows, 1))
        rounded = [
            restore(quantize(values, INT4, method="gptq", hessian=each))
            for each in (total.estimate(), total.matrix())
        ]
        shrunk, plain = (output_error(others, values, each) for each in rounded)
        assert shrunk < gain * plain, rows
