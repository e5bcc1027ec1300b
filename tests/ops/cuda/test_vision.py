"""The steps of vision encoders on the GPU's kernels: numpy in float64 as the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from localrt.quant.choose import all_vision_steps, vision_steps
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.tensor import Tensor
from localrt.quant.cuda.vision import CudaVision
from localrt.quant.formats import unpack
from localrt.quant.ops.vision import (
    Heads,
    PatchLayout,
    VisionActivation,
    VisionSteps,
    activate,
)
from localrt.quant.reference.ops import TorchOps
from tests.ops.cuda.target import DEVICE
from tests.ops.packed import random_tensor
from tests.ops.test_native_vision import ACTIVATIONS, error, floats

EXACT = 3e-6
BRAINS = 8e-3  # rounded to bf16 on the way
CODES = 2e-2  # in 8 bits
NUMPY = VisionSteps(TorchOps(compute_format="f32", device="cpu"))


def steps_on_gpu() -> CudaVision:
    steps = vision_steps(CudaOps(device=str(DEVICE)))
    assert isinstance(steps, CudaVision)
    return steps


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU, and the CPU where that has no room; without compiled kernels the GPU alone."""
    gpu, cpu = CudaOps(device=str(DEVICE)), TorchOps(compute_format="f32", device="cpu")
    assert [steps.ops for steps in all_vision_steps([cpu, gpu])] == [gpu, cpu]
    assert [steps.ops for steps in all_vision_steps([cpu])] == [cpu]
    assert [steps.on_gpu for steps in all_vision_steps([gpu])][:1] == [True]
    monkeypatch.setattr("localrt.quant.choose.find_library", lambda: None)
    assert [steps.ops for steps in all_vision_steps([gpu])] == [gpu]


@pytest.mark.parametrize(("name", "columns"), [("bf16", 136), ("f16", 43), ("q8_0", 96)])
def test_products(name: str, columns: int) -> None:
    """Of rows on the host and on the GPU, with a bias and an activation."""
    steps, tensor, bias = steps_on_gpu(), random_tensor(name, 75, columns), floats(75)
    weight, there = steps.ops.weight((75, columns), [tensor]), steps.ops.vector(bias)
    bound = CODES if name == "q8_0" else BRAINS
    for rows in (1, 70, 150):
        x = floats(rows, columns, seed=rows)
        expected = x @ unpack(tensor).T + bias
        found = steps.linear(steps.put(x), weight, there)
        assert isinstance(found, Tensor)
        assert error(steps.get(found), expected) < bound
        np.testing.assert_array_equal(steps.linear(x, weight, there), steps.get(found))
        active = steps.get(steps.linear(steps.put(x), weight, there, "gelu"))
        assert error(active, activate(expected, "gelu")) < bound


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: VisionActivation) -> None:
    steps, x = steps_on_gpu(), 4 * floats(9, 2 * 77)
    expected = NUMPY.gated(x, activation)
    assert error(steps.get(steps.gated(steps.put(x), activation)), expected) < BRAINS
    np.testing.assert_array_equal(steps.gated(x, activation), expected)


@pytest.mark.parametrize("size", [24, 300, 1152])
def test_norms_and_sums(size: int) -> None:
    steps, x, y = steps_on_gpu(), floats(13, size) * 3 + 5, floats(13, size, seed=1)
    values, bias = floats(size, seed=2), floats(size, seed=3)
    weight, own = steps.ops.vector(values), steps.ops.vector(bias)
    there = steps.put(x)
    expected = NUMPY.layer_norm(x, NUMPY.ops.vector(values), NUMPY.ops.vector(bias), 1e-6)
    assert error(steps.get(steps.layer_norm(there, weight, own, 1e-6)), expected) < BRAINS
    assert error(steps.layer_norm(x, weight, own, 1e-6), expected) < EXACT
    for vector, theirs in ((weight, NUMPY.ops.vector(values)), (None, None)):
        expected = NUMPY.rms_norm(x, theirs, 1e-6)
        assert error(steps.get(steps.rms_norm(there, vector, 1e-6)), expected) < EXACT
    np.testing.assert_array_equal(steps.get(steps.add(there, steps.put(y))), x + y)
    np.testing.assert_array_equal(steps.get(there), x)
    clipped = steps.clip(there, 3.0, 6.5)
    np.testing.assert_array_equal(steps.get(clipped), np.clip(x, 3, 6.5))
    joined = steps.joined([there, clipped])
    np.testing.assert_array_equal(steps.get(joined), np.hstack([x, np.clip(x, 3, 6.5)]))


@pytest.mark.parametrize("size", [8, 64, 72, 80, 20])
@pytest.mark.parametrize("ends", [(5,), (64, 128, 131), (300,), (70, 340)])
def test_attention(size: int, ends: tuple[int, ...]) -> None:
    """Heads of 20 numbers are the host's."""
    steps, rows = steps_on_gpu(), ends[-1]
    qkv, angles = floats(rows, 3 * 2 * size, seed=rows), floats(rows, size // 2, seed=1)
    norms = floats(size, seed=2), floats(size, seed=3)
    for layout, axes, normed in (
        (PatchLayout(ends=ends), 1, False),
        (PatchLayout(ends=ends, cos=np.cos(angles), sin=np.sin(angles)), 1, True),
        (PatchLayout(ends=ends, cos=np.cos(angles), sin=np.sin(angles)), 2, True),
    ):
        found, expected = (
            own.get(
                own.heads(
                    own.put(qkv),
                    Heads(
                        count=2,
                        size=size,
                        scale=0.2,
                        eps=1e-6,
                        q_norm=own.ops.vector(norms[0]) if normed else None,
                        k_norm=own.ops.vector(norms[1]) if normed else None,
                        value_norm=normed,
                        axes=axes,
                    ),
                    layout,
                )
            )
            for own in (steps, NUMPY)
        )
        assert error(found, expected) < 3 * BRAINS


@pytest.mark.parametrize("ends", [(6,), (64, 200), (300,)])
def test_shared_heads(ends: tuple[int, ...]) -> None:
    """Six heads share two of keys and values."""
    qkv, angles = floats(ends[-1], 10 * 16, seed=ends[-1]), floats(ends[-1], 8, seed=1)
    layout = PatchLayout(ends=ends, cos=np.cos(angles), sin=np.sin(angles))
    several: Heads = Heads(count=6, size=16, scale=0.4, eps=1e-6, kv_count=2)
    found, expected = (
        own.get(own.heads(own.put(qkv), several, layout)) for own in (steps_on_gpu(), NUMPY)
    )
    assert error(found, expected) < 3 * BRAINS
