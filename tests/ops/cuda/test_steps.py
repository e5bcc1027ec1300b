"""The small steps, each against its plain definition."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from localrt.quant.cuda import steps
from localrt.quant.cuda.products import empty_records
from localrt.quant.cuda.products import quantize as to_records
from localrt.quant.methods.rotation import block_hadamard
from localrt.quant.ops.experts import ExpertActivation, ExpertSpec
from localrt.quant.ops.protocol import MlpSpec
from localrt.quant.ops.streams import rows_of_tokens
from localrt.quant.reference.experts import gated
from tests.ops.cuda.target import DEVICE, back, by_torch, random, there

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


def test_gates_and_ups_apart() -> None:
    gates, more = random(3, 40), random(3, 100, seed=1)
    ups = more[:, 50:90]
    wanted = gate(torch.cat([gates, ups], 1), "gelu_tanh")
    assert torch.equal(gate(gates, "gelu_tanh", up=ups), wanted)


def test_rows_of_tokens() -> None:
    tokens = np.array([3, 0, 7, 9])  # the table has rows of seven
    got = by_torch(steps.token_rows)(torch.from_numpy(tokens), 5, 35)
    assert got.tolist() == rows_of_tokens(tokens, 5, 35).tolist()


def test_factor_of_a_sum() -> None:
    x, y = random(3, 40), random(3, 40, seed=1)
    wanted = (x + y) * 0.3
    torch.testing.assert_close(move_rows(x, y, add=True, total=0.3), wanted)


def test_scaled_gates() -> None:
    both = random(3, 2 * 40)
    wanted = gated(both, MlpSpec(activation="silu", eps=0.0, gate_scale=0.7))
    torch.testing.assert_close(gate(both, "silu", scale=0.7).float(), wanted, **CLOSE)


def test_xielu() -> None:
    up = random(3, 2 * 1100)
    spec = MlpSpec(activation="xielu", eps=0.0, curve=(0.9, 1.3, 0.5, -1e-6))
    got = gate(up, "xielu", curve=spec.curve)
    torch.testing.assert_close(got.float(), gated(up, spec), **CLOSE)


@pytest.mark.parametrize("size", [2, 16, 64, 128])
def test_hadamard_is_the_quantizers(size: int) -> None:
    x = random(3, 384).bfloat16()
    wanted = block_hadamard(x.float().numpy(), size)
    got = rotate_blocks(x, size).float().numpy()
    assert np.abs(got - wanted).max() < 2**-7 * np.abs(wanted).max()


def test_hadamard_of_heads() -> None:
    """Whose rows lie apart, and in place."""
    x = random(5, 3, 80).bfloat16()[..., :64].transpose(0, 1)
    plain = rotate_blocks(x.reshape(-1, 64), 16).view(3, 5, 64)
    assert torch.equal(rotate_blocks(x, 16), plain)
    own = x.contiguous()
    assert rotate_blocks(own, 16, out=own) is own
    assert torch.equal(own, plain)


def test_hadamard_of_an_odd_size_is_refused() -> None:
    with pytest.raises(ValueError, match="in blocks of 48"):
        rotate_blocks(random(1, 96).bfloat16(), 48)


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


def test_scaled_columns() -> None:
    rows, scales = random(3, 400), random(300, seed=1)
    x = rows[:, 50:350]
    wanted = x * scales
    assert move_rows(x, x, scales=scales) is x
    assert torch.equal(x, wanted)


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
