"""The small steps, the best logits, and the steps of vision encoders, each against its plain
definition.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from localrt.quant.choose import vision_steps
from localrt.quant.cuda import steps
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.products import empty_records
from localrt.quant.cuda.products import quantize as to_records
from localrt.quant.cuda.steps import BestLogits
from localrt.quant.cuda.tensor import Tensor
from localrt.quant.cuda.vision import CudaVision
from localrt.quant.formats import unpack
from localrt.quant.formats.packed import Floats
from localrt.quant.methods.rotation import block_hadamard
from localrt.quant.ops.experts import ExpertActivation, ExpertSpec
from localrt.quant.ops.vision import Heads, PatchLayout, VisionSteps, activate
from localrt.quant.reference.experts import gated
from localrt.quant.reference.ops import TorchOps
from tests.ops.cuda.target import DEVICE, back, by_torch, random, there
from tests.ops.oracles import best_of
from tests.ops.packed import random_tensor
from tests.ops.test_native_vision import error, floats

# bf16 results: 8 bits.
CLOSE = {"rtol": 1e-2, "atol": 1e-2}


converted, gate = by_torch(steps.converted), by_torch(steps.gate)
move_rows, norm = by_torch(steps.move_rows), by_torch(steps.norm)
norm_gate, norm_records = by_torch(steps.norm_gate), by_torch(steps.norm_records)
norm_in_place = by_torch(steps.norm_in_place)
rotate_blocks, quantize = by_torch(steps.rotate_blocks), by_torch(to_records)


@pytest.mark.parametrize("width", [64, 96, 5000])
def test_norm_keeps_the_sum(width: int) -> None:
    x, y, weight = random(3, width), random(3, width, seed=1), random(width)
    total = x + y
    got = norm(x, weight, 1e-6, pending=y, out=torch.bfloat16)
    assert torch.equal(x, total)
    torch.testing.assert_close(got.float(), F.rms_norm(total, (width,), weight, 1e-6), **CLOSE)
    exact = norm(x, weight, 1e-6, out=torch.float32)
    torch.testing.assert_close(exact, F.rms_norm(total, (width,), weight, 1e-6))
    records = norm_records(x, weight, 1e-6)
    found, wanted = (back(each.data)[:, :3] for each in (records, quantize(exact)))
    assert torch.equal(found, wanted)
    norm_in_place(x, weight, 1e-6)
    assert torch.equal(x, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", get_args(ExpertActivation))
def test_gate(activation: ExpertActivation, dtype: torch.dtype) -> None:
    both = random(3, 2 * 1100).to(dtype)
    wanted = gated(both.float(), ExpertSpec(activation=activation, limit=0.5))
    got = gate(both, activation, limit=0.5)
    torch.testing.assert_close(got.float(), wanted, **CLOSE)


@pytest.mark.parametrize("size", [2, 16, 64, 128])
def test_hadamard_is_the_quantizers(size: int) -> None:
    x = random(3, 384).bfloat16()
    wanted = block_hadamard(x.float().numpy(), size)
    got = rotate_blocks(x, size).float().numpy()
    assert np.abs(got - wanted).max() < 2**-7 * np.abs(wanted).max()


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_moved_rows(kind: torch.dtype, into: torch.dtype) -> None:
    """Rows that lie apart: chosen, scaled, added."""
    x, y = random(4, 400).to(kind)[:, 50:350], random(3, 600, seed=1).to(into)[:, 300:]
    index = torch.tensor([3, 0, 3])
    wanted = (x[index].float() * 0.3).to(into)
    assert torch.equal(move_rows(x, torch.empty_like(y), index=index, scale=0.3), wanted)
    total = (y.float() + x[index].float() * 0.3).to(into)
    assert move_rows(x, y, index=index, scale=0.3, add=True) is y
    assert torch.equal(y, total)
    assert torch.equal(converted(x, into), x.to(into))
    assert converted(y.contiguous(), kind).is_contiguous()
    own = x.contiguous()
    assert converted(own, kind) is own
    nothing = torch.empty(0, 300)
    assert move_rows(nothing, nothing) is nothing


def test_rows_under_a_gate_or_a_cap() -> None:
    x, gates = random(3, 300), random(3, 1, seed=1)
    torch.testing.assert_close(move_rows(x, x.clone(), gates=gates), x * gates.sigmoid())
    assert torch.equal(move_rows(x, x.clone(), factors=gates), x * gates)
    wanted = torch.tanh(x / 0.7) * 0.7
    assert move_rows(x, x, softcap=0.7) is x
    torch.testing.assert_close(x, wanted)


def test_rotary() -> None:
    """Of positions that are far too."""
    positions = torch.tensor([0, 1, 77, 131071])
    frequencies = 10000.0 ** -(torch.arange(33) / 33)
    angles = positions.float()[:, None] * frequencies
    tables = steps.rotary(there(positions), there(frequencies), 1.2)
    for got, wanted in zip(map(back, tables), (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(got, wanted * 1.2)


@pytest.mark.parametrize("width", [40, 640])
def test_rows_are_gated(width: int) -> None:
    x, gates = random(5, width).bfloat16(), random(5, 2 * width, seed=1).bfloat16()[:, width:]
    for kind, function in (("softplus", F.softplus), ("silu", F.silu), ("sigmoid", F.sigmoid)):
        wanted = x.float() * function(gates.float())
        torch.testing.assert_close(norm_gate(x, gates, gate=kind).float(), wanted, **CLOSE)
    if width % 64 == 0:
        records = empty_records(1, 5, width, DEVICE)
        norm_gate(x, torch.zeros_like(x), records=records)  # whose sigmoids are exact
        found, wanted = (back(r.data)[0, :5] for r in (records, quantize(x.float() / 2)))
        assert torch.equal(found, wanted)


# -- the best logits -------------------------------------------------------------------------------


def logits_of(kind: str, seed: int, rows: int, vocab: int) -> Floats:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=4, size=(rows, vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits / 4)  # zeros of both signs among them
    elif kind == "excluded":
        logits[rng.random(logits.shape) < 0.99] = -np.inf
    elif kind == "equal":
        logits[:] = 2.5
    elif kind == "nan":
        logits[rng.random(logits.shape) < 2 / vocab] = np.nan
    return logits


@pytest.mark.parametrize("kind", ["plain", "ties", "excluded", "equal", "nan"])
# Fewer tokens than are wanted, one block of a row, several, and more than all take at once.
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(2, 40), (3, 64), (2, 9001), pytest.param(1, 270_000, marks=pytest.mark.slow)],
)
def test_order(kind: str, rows: int, vocab: int) -> None:
    best = BestLogits(there(torch.zeros(rows, vocab)))
    for seed in range(2):  # what a pass leaves does not change the next one
        logits = logits_of(kind, seed, rows, vocab)
        best.find(there(torch.from_numpy(logits)))
        assert best.rows(rows).tobytes() == best_of(logits).tobytes()


# -- vision encoders: numpy as the oracle ----------------------------------------------------------

EXACT = 3e-6
BRAINS = 8e-3  # rounded to bf16 on the way
CODES = 2e-2  # in 8 bits
NUMPY = VisionSteps(TorchOps(compute_format="f32", device="cpu"))


def steps_on_gpu() -> CudaVision:
    steps = vision_steps(CudaOps(device=str(DEVICE)))
    assert isinstance(steps, CudaVision)
    return steps


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


@pytest.mark.parametrize(
    ("size", "ends"),
    [(8, (70, 340)), (20, (5,)), pytest.param(72, (64, 128, 131), marks=pytest.mark.slow)],
)
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
