"""The MLP on packed weights: straight to codes or by way of floats, in any batch the same."""

from __future__ import annotations

import numpy as np
import pytest

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import F32, pack, unpack
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.methods.rotation import block_hadamard
from localrt.quant.ops.protocol import MlpSpec, MlpWeights
from tests.conftest import needs_kernels
from tests.ops.oracles import gated
from tests.ops.packed import random_tensor
from tests.ops.test_native_matmul import ISAS, quantized

pytestmark = needs_kernels

HIDDEN, INNER = 256, 768


def renamed(name: str, rows: int, cols: int, label: str, seed: int):
    tensor = random_tensor(name, rows, cols, seed)
    object.__setattr__(tensor, "name", label)
    return tensor


def build(ops: NativeOps, gate: str, up: str, down: str, hadamard: int) -> MlpWeights:
    parts = [renamed(up, INNER, HIDDEN, "up", 2)]
    if gate:
        parts.insert(0, renamed(gate, INNER, HIDDEN, "gate", 1))
    last = tile_tensor(random_tensor(down, HIDDEN, INNER, 3), hadamard=hadamard)
    return MlpWeights(
        norm=ops.vector(np.ones(HIDDEN, np.float32)),
        gate_up=ops.weight((len(parts) * INNER, HIDDEN), parts),
        down=ops.weight((HIDDEN, INNER), [last]),
    )


def reference(
    x: np.ndarray, gate: str, up: str, down: str, hadamard: int, spec: MlpSpec
) -> np.ndarray:
    """Float64 on the activations that the kernels quantize to."""
    x = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6).astype(np.float32)
    seen = quantized(x)
    g, u = (
        seen @ unpack(random_tensor(name, INNER, HIDDEN, seed)).astype(np.float64).T
        for name, seed in ((gate or up, 1), (up, 2))
    )
    product = gated(g, u, spec).astype(np.float32)
    if hadamard:
        product = block_hadamard(product, hadamard)
    last = unpack(random_tensor(down, HIDDEN, INNER, 3)).astype(np.float64)
    return quantized(product) @ last.T


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("gate", "up", "down", "hadamard"),
    [
        ("q4_k", "q4_k", "q6_k", 0),  # side by side
        ("int4-g32", "int4-g32", "mxfp4", 32),
        ("q4_k", "q4_k", "q4_k", 64),
        ("nvfp4", "nvfp4", "nvfp4", 128),  # rotations too wide for one task
        ("q4_k", "q5_k", "q4_k", 0),  # layouts that differ
        ("q4_k", "q4_k", "bf16", 0),  # a last matrix that takes floats
        ("", "q4_k", "q6_k", 0),  # without a gate
        ("", "int4-g32", "mxfp4", 32),
    ],
)
def test_every_way_through_the_mlp(gate: str, up: str, down: str, hadamard: int, isa: str) -> None:
    spec = MlpSpec(activation="silu" if gate else "relu2", eps=1e-6, gate_scale=0.7)
    x = np.random.default_rng(0).standard_normal((37, HIDDEN)).astype(np.float32)
    two, one = NativeOps(threads=2, isa=isa), NativeOps(threads=1, isa=isa)
    weights = build(two, gate, up, down, hadamard)
    whole = two.norm_gated_mlp(x, weights, spec)
    if down != "bf16":
        expected = reference(x, gate, up, down, hadamard, spec)
        # The last digit of a product may move an activation to the next code.
        assert np.abs(whole - expected).max() < 5e-3 * np.abs(expected).max()
    weights = build(one, gate, up, down, hadamard)
    for count in (1, 2, 3, 4, 5, 7, 13, 31):
        assert np.array_equal(one.norm_gated_mlp(x[:count], weights, spec), whole[:count])


@pytest.mark.parametrize("isa", ISAS)
def test_xielu(isa: str) -> None:
    """On its own, through matrices that change nothing."""
    ops, curve = NativeOps(threads=1, isa=isa), (0.9, 1.3, 0.5, -1e-6)
    spec, size = MlpSpec(activation="xielu", eps=1e-6, curve=curve), 64
    small = np.geomspace(1e-8, 90, size - 1)
    x = np.stack([np.append(small, 0), np.append(-small, -0.35)]).astype(np.float32)
    same = pack(np.eye(size, dtype=np.float32), F32, name="same")
    weights = MlpWeights(
        norm=None, gate_up=ops.weight((size, size), [same]), down=ops.weight((size, size), [same])
    )
    exact, (positive, negative, beta, eps) = x.astype(np.float64), curve
    low = negative * (np.expm1(np.minimum(exact, eps)) - exact)
    wanted = np.where(exact > 0, positive * exact**2, low) + beta * exact
    off = np.abs(ops.norm_gated_mlp(x, weights, spec) - wanted)
    assert (off <= 1e-6 * (np.abs(exact) + exact**2) + 1e-12).all()  # y is 0 near -1.07
