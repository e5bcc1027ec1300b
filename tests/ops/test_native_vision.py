"""The steps of vision encoders on the CPU's kernels: numpy in float64 as the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from localrt.quant.choose import vision_steps
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.vision import NativeVision
from localrt.quant.formats import unpack
from localrt.quant.ops.vision import VisionActivation, VisionSteps, activate
from tests.conftest import needs_kernels
from tests.ops.packed import random_tensor
from tests.ops.test_native_matmul import ISAS, quantized

pytestmark = needs_kernels

ROWS = (1, 7, 17, 100)
HEADS = (64, 72, 80, 88)
ACTIVATIONS: tuple[VisionActivation, ...] = ("gelu", "gelu_tanh", "quick_gelu", "silu")
EXACT = 2e-6
BRAINS = 6e-3  # products of bf16
IN_BF16 = ("amx", "avx512bf16", "i8mm")


def native(isa: str, threads: int = 2) -> NativeVision:
    steps = vision_steps(NativeOps(threads=threads, isa=isa))
    assert isinstance(steps, NativeVision)
    return steps


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_0", "q6_k", "q2_k"])
def test_products(name: str, isa: str) -> None:
    packed = name.startswith("q")
    in_bf16 = name != "f32" and (isa == "amx" or (isa in IN_BF16 and not packed))
    columns = 541 if not packed else 768 if name.endswith("k") else 544
    steps = native(isa)
    tensor = random_tensor(name, 203, columns)
    weight, bias = steps.ops.weight((203, columns), [tensor]), steps.ops.vector(floats(203))
    for rows in (1, 7, 33, 170):
        x = floats(rows, columns, seed=rows)
        seen = quantized(x) if packed and not in_bf16 else x.astype(np.float64)
        expected = seen @ unpack(tensor).astype(np.float64).T
        found = steps.linear(x, weight)
        assert error(found, expected) < (BRAINS if in_bf16 else EXACT)
        biased = steps.linear(x, weight, bias)
        np.testing.assert_array_equal(biased, found + bias.values)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: VisionActivation, isa: str) -> None:
    steps = native(isa)
    weight = steps.ops.weight((32, 32), [random_tensor("f32", 32, 32)])
    x = np.linspace(-20, 20, 64 * 32, dtype=np.float32).reshape(64, 32) / 8
    x[0, :4] = (-1e4, 1e4, -90, 90)
    plain = steps.linear(x, weight)
    expected = VisionSteps.gated(steps, np.hstack([plain, np.ones_like(plain)]), activation)
    np.testing.assert_allclose(steps.linear(x, weight, None, activation), expected, 2e-5, 2e-6)
    wide = floats(17, 2 * 77)
    gated = activate(wide[:, :77].astype(np.float64), activation) * wide[:, 77:]
    assert error(steps.gated(wide, activation), gated) < EXACT


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [64, 72, 80, 88, 1152])
def test_norms(size: int, isa: str) -> None:
    steps = native(isa)
    weight, bias = steps.ops.vector(floats(size)), steps.ops.vector(floats(size, seed=1))
    for rows in ROWS:
        wide = floats(rows, 3, 2, size, seed=rows) * 3 + 5
        for x in (np.ascontiguousarray(wide[:, 0, 0]), wide[:, 1]):
            exact = x.astype(np.float64)
            rms = exact / np.sqrt(np.square(exact).mean(-1, keepdims=True) + 1e-6)
            assert error(steps.rms_norm(x, None, 1e-6), rms) < EXACT
            assert error(steps.rms_norm(x, weight, 1e-6), rms * weight.values) < EXACT
        exact = x.astype(np.float64)
        off = exact - exact.mean(-1, keepdims=True)
        normed = off / np.sqrt(np.square(off).mean(-1, keepdims=True) + 1e-6)
        assert error(steps.layer_norm(x, weight, None, 1e-6), normed * weight.values) < EXACT
        expected = normed * weight.values + bias.values
        assert error(steps.layer_norm(x, weight, bias, 1e-6), expected) < EXACT


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", HEADS)
def test_attention(size: int, isa: str) -> None:
    steps = native(isa)
    for ends in ((1,), (17,), (1, 18, 19, 150), (64, 128), (33, 290 if isa == ISAS[0] else 140)):
        rows = ends[-1]
        q, k, v = (floats(rows, 3, 5, size, seed=rows)[:, i] for i in range(3))
        expected = VisionSteps.attention(
            steps, *(each.astype(np.float64) for each in (q, k, v)), 0.3, ends
        )
        found = steps.attention(q, k, v, 0.3, ends)
        assert error(found, expected) < (1e-2 if isa in IN_BF16 else 5e-6)
