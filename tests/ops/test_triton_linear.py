"""Products with tiled weights and unpacked rows, against the float32 reference in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.quant.formats import FORMATS, PackedTensor, unpack
from localrt.quant.formats.tiled import tile_span
from tests.ops.packed import random_tensor
from tests.ops.triton_target import DEVICE, tiles_of

from localrt.quant.ops.triton.formats import layout_of  # isort: skip
from localrt.quant.ops.triton.linear import Tiling, dense_linear, tiled_linear  # isort: skip
from localrt.quant.ops.triton.rows import unpack_rows  # isort: skip

KNOWN = sorted(name for name, format_ in FORMATS.items() if layout_of(format_) is not None)
# What is left: float32 sums in another order; NF4's levels are rounded to bf16.
TOLERANCE = {name: 3e-3 if name == "nf4" else 2e-5 for name in KNOWN}
MANY = ("q4_0", "q4_k", "q5_0", "q6_k", "mxfp4", "nvfp4", "nf4", "int4-g32m", "int8-g32m")


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def inputs(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16().to(DEVICE)


def product(
    x: torch.Tensor, tensor: PackedTensor, *, cut: Tiling | None = None, gate: str | None = None
) -> np.ndarray:
    rows = tensor.shape[0] // (2 if gate else 1)
    out = torch.full((len(x), rows), float("nan"), device=DEVICE)
    tiled_linear(x, tiles_of(tensor), out, gate=gate, cut=cut)
    return out.cpu().numpy()


def expected(x: torch.Tensor, tensor: PackedTensor) -> np.ndarray:
    return x.double().cpu().numpy() @ unpack(tensor).astype(np.float64).T


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def same(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Bit for bit; in the interpreter, where BLAS chooses the order within a dot, all but."""
    return np.array_equal(got, wanted) if DEVICE == "cuda" else error(got, wanted) < 1e-6


def test_every_tiled_format_has_a_kernel() -> None:
    assert [n for n in FORMATS if n not in KNOWN] == ["f32", "f16", "bf16"]


@pytest.mark.parametrize("name", KNOWN)
def test_a_product_of_every_format(name: str) -> None:
    tensor = random_tensor(name, 21, 768)  # a padded tile, chains of unequal length
    x = inputs(3, 768)
    assert error(product(x, tensor), expected(x, tensor)) < TOLERANCE[name]


@pytest.mark.parametrize("name", KNOWN)
def test_rows_are_the_reference_exactly(name: str) -> None:
    tensor = random_tensor(name, 53, 256)
    values = torch.from_numpy(unpack(tensor))
    tiles = tiles_of(tensor)
    count = 20 if name in ("q4_0", "q6_k", "nf4") else 10  # rows of two programs, or of one
    some = torch.empty(count, 256, device=DEVICE)
    unpack_rows(tiles, some, first=9)
    index = torch.tensor([3, 52, 17, 17])
    picked = torch.empty(4, 256, device=DEVICE)
    unpack_rows(tiles, picked, index=index.to(DEVICE), factor=2.0)
    wanted = values[9 : 9 + count], 2 * values[index]
    if name == "nf4":
        largest = float(values.abs().max())
        assert (some.cpu() - wanted[0]).abs().max() < largest / 256
        assert (picked.cpu() - wanted[1]).abs().max() < largest / 128
    else:
        assert torch.equal(some.cpu(), wanted[0])
        assert torch.equal(picked.cpu(), wanted[1])


@settings(max_examples=8)
@given(
    name=st.sampled_from(MANY),
    rows=st.integers(1, 70),
    spans=st.integers(1, 9),
    batch=st.integers(1, 64),
    seed=st.integers(0, 99),
)
def test_any_shape(name: str, rows: int, spans: int, batch: int, seed: int) -> None:
    columns = spans * tile_span(FORMATS[name])
    tensor = random_tensor(name, rows, columns, seed)
    x = inputs(batch, columns, seed)
    assert error(product(x, tensor), expected(x, tensor)) < TOLERANCE[name]


@pytest.mark.parametrize("name", ["nvfp4", *slow("q4_0", "q6_k")])
def test_the_cut_and_the_other_rows_change_nothing(name: str) -> None:
    tensor = random_tensor(name, 38, 768)
    x = inputs(64, 768)
    whole = product(x, tensor)
    for batch in (1, 5, 16, 33):
        assert same(product(x[:batch], tensor), whole[:batch])
    for cut in (
        Tiling(tiles=1, columns=8, unroll=2, stages=1),
        Tiling(tiles=4, columns=8, unroll=1, stages=2),
        Tiling(tiles=2, columns=16, unroll=1, stages=3),
    ):
        assert same(product(x[60:], tensor, cut=cut), whole[60:])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["q4_1", "mxfp4"])
def test_the_gate_is_part_of_the_product(name: str, activation: str) -> None:
    tensor = random_tensor(name, 96, 256)
    x = inputs(5, 256)
    both = torch.from_numpy(expected(x, tensor))
    gate, up = both[:, :48], both[:, 48:]
    if activation == "silu":
        wanted = torch.nn.functional.silu(gate) * up
    else:
        wanted = torch.nn.functional.gelu(gate, approximate="tanh") * up
    got = product(x, tensor, gate=activation)
    assert error(got, wanted.numpy()) < 1e-4


def test_bias_and_views() -> None:
    tensor = random_tensor("q4_0", 40, 128)
    x = inputs(4, 128)
    bias = torch.randn(40, device=DEVICE)
    out = torch.zeros(4, 100, device=DEVICE)
    tiled_linear(x, tiles_of(tensor), out[:, 30:70], bias=bias)
    wanted = expected(x, tensor) + bias.cpu().numpy()
    assert error(out[:, 30:70].cpu().numpy(), wanted) < 2e-5
    assert not out[:, :30].any()
    assert not out[:, 70:].any()


@pytest.mark.parametrize("batch", [1, 9, 40])
def test_bf16_weights(batch: int) -> None:
    w = inputs(50, 352, seed=1)
    x = inputs(batch, 352)
    out = torch.empty(batch, 50, device=DEVICE)
    dense_linear(x, w, out)
    assert error(out.cpu().numpy(), (x.double() @ w.double().T).cpu().numpy()) < 2e-5
    alone = torch.empty(1, 50, device=DEVICE)
    dense_linear(x[-1:], w, alone)
    assert same(alone[0].cpu().numpy(), out[-1].cpu().numpy())


def test_extreme_scales() -> None:
    """Exponent 0 of MXFP4, subnormal scales of NVFP4, and a scale of zero."""
    mx = random_tensor("mxfp4", 16, 64)
    mx.data.reshape(16, 2, 17)[:, 0, 0] = 0
    nv = random_tensor("nvfp4", 16, 64)
    nv.data.reshape(16, 4, 9)[:, :, 0] = [[0, 1, 7, 126]] * 16
    for tensor in (mx, nv):
        out = torch.empty(16, 64, device=DEVICE)
        unpack_rows(tiles_of(tensor), out)
        assert np.array_equal(out.cpu().numpy(), unpack(tensor))
