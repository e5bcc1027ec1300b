"""Products with packed weights, on the CPU: against float64, and bit for bit among each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.cuda import launch
from localrt.quant.cuda.formats import TYPES
from localrt.quant.cuda.launch import LaunchShape, best_shape
from localrt.quant.cuda.products import (
    Records,
    TiledMatrix,
    empty_records,
    product,
    quantize,
)
from localrt.quant.formats import FORMATS, unpack
from localrt.quant.formats.tiled import tile_span
from localrt.quant.ops.experts import ExpertSpec
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE, back, there, tiles_of
from tests.ops.oracles import gated
from tests.ops.packed import random_tensor

# NF4's levels are 127ths.
TOLERANCE = {name: 8e-3 if name.startswith(("nf4", "fp4-f32")) else 1e-6 for name in TYPES}
# One of each kind of code, of scale and of span.
SOME = (
    *("q2_k", "q4_0", "q4_k", "q5_1", "q6_k", "q8_0"),
    *("iq3_s", "iq2_xs", "iq1_m", "mxfp4", "nvfp4", "nf4"),
)


@dataclass(frozen=True)
class Matrix(TiledMatrix):
    """With what its bytes stand for: (rows, columns), float64."""

    values: Any = None


def matrix(name: str, rows: int, columns: int, seed: int = 0) -> Matrix:
    tensor = random_tensor(name, rows, columns, seed)
    tiles = tiles_of(tensor)
    values = unpack(tensor).astype(np.float64)
    return Matrix(name, (rows, columns), tiles.data, tiles.factor, values)


def inputs(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(64, columns, generator=generator)[:rows]


def quantized(x: torch.Tensor, *, fine: bool = False) -> Records:
    return quantize(there(x), fine=fine)


def values_of(x: Records) -> np.ndarray:
    values: np.ndarray = x.values()[0]
    return values


def run(
    x: Records, weight: Matrix, *, division: LaunchShape | None = None, gate: str | None = None
) -> np.ndarray:
    out = there(torch.full((x.rows, weight.shape[0] // (2 if gate else 1)), float("nan")))
    product(x, weight, out, gate=gate, limit=7.0, division=division)
    return out.to_host()


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def test_every_packed_format_has_a_kernel() -> None:
    # E4M3 codes are no whole numbers
    whole = ["f32", "f16", "bf16", "e4m3-g128", "e4m3-g64", "e4m3-g32", "f8_e4m3"]
    assert [name for name in FORMATS if name not in TYPES] == whole


def test_rows_in_8_bits_are_within_half_a_step(emulator: Emulator) -> None:
    x = inputs(3, 96)
    x[1, :32] = 0
    records = quantized(x)
    found = values_of(records)
    steps = np.abs(x.numpy()).reshape(3, -1, 32).max(-1) / 127
    assert (np.abs(found - x.numpy()).reshape(3, -1, 32).max(-1) <= steps * 0.5001).all()
    # Beside a record's numbers: the same times -1, and the sum of each step.
    each = records.data.to_host().reshape(1, 8, 2, 144)[0, :3]
    assert np.array_equal(each[..., 64:128].view(np.int8), -each[..., :64].view(np.int8))
    sums = np.ascontiguousarray(each[..., 128:]).view(np.float32).reshape(3, 4, 2)[:, :3, 1]
    assert np.allclose(sums, found.reshape(3, 3, 32).sum(-1), rtol=1e-5, atol=1e-5)


def test_fine_rows(emulator: Emulator) -> None:
    x = inputs(3, 96)
    x[1, :32] = 0
    steps = np.abs(x.numpy()).reshape(3, -1, 32).max(-1) / 32384
    found = values_of(quantized(x, fine=True))
    assert (np.abs(found - x.numpy()).reshape(3, -1, 32).max(-1) <= steps * 0.51).all()


@pytest.mark.parametrize(("name", "gate"), [("q4_0", None), ("nf4", None), ("q4_k", "silu")])
def test_fine_batch_invariance(emulator: Emulator, name: str, gate: str | None) -> None:
    weight, x = matrix(name, 64, 768), inputs(9, 768)
    alone = [run(quantized(x[i : i + 1], fine=True), weight, gate=gate)[0] for i in range(2)]
    wanted = x[0].numpy().astype(np.float64) @ weight.values.T
    if gate:
        wanted = gated(wanted[:32], wanted[32:], ExpertSpec(limit=7.0))
    assert error(alone[0], wanted) < max(1e-3, TOLERANCE[name])
    for rows in (2, 3, 9):
        found = run(quantized(x[:rows], fine=True), weight, gate=gate)
        assert np.array_equal(found[:2], alone)


def test_rows_that_a_warp_loads_are_there() -> None:
    for rows in range(1, 65):
        for fine in (False, True):
            records = empty_records(1, rows, 64, DEVICE, fine=fine)
            loaded = 8 * best_shape("q4_0", records.count, 64, 24).groups
            assert records.data.shape[1] % loaded == 0


@pytest.mark.parametrize("name", sorted(TYPES))
def test_products_are_those_of_float64(emulator: Emulator, name: str) -> None:
    # Columns that are not whole turns of the kernel's loop, rows that are not whole tiles.
    columns = 3 * 256 if tile_span(FORMATS[name]) == 256 else 384 + tile_span(FORMATS[name])
    weight, x = matrix(name, 40, columns), quantized(inputs(1, columns))
    assert error(run(x, weight), values_of(x) @ weight.values.T) < TOLERANCE[name]


@pytest.mark.parametrize("name", SOME)
def test_batch_invariance(emulator: Emulator, name: str) -> None:
    weight, x = matrix(name, 32, 768), inputs(41, 768)
    alone = [run(quantized(x[i : i + 1]), weight)[0] for i in range(3)]
    for rows in (2, 8, 11) if name != "q4_0" else (2, 4, 5, 8, 16, 17, 41):
        found = run(quantized(x[:rows]), weight)
        assert np.array_equal(found[: min(3, rows)], alone[: min(3, rows)]), rows
    emulator.seed += 1  # another order of threads and blocks
    assert np.array_equal(run(quantized(x[:3]), weight), np.stack(alone))


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, 50) for name in sorted(TYPES)), *((name, 70) for name in (*SOME, "int8-g32"))],
)
def test_many_rows_have_the_bits_of_few(emulator: Emulator, name: str, rows: int) -> None:
    """In blocks of 64 rows, and of 128 or 96."""
    columns = 3 * 256 if tile_span(FORMATS[name]) == 256 else 384 + tile_span(FORMATS[name])
    weight, x = matrix(name, 40, columns), torch.cat([inputs(50, columns), inputs(20, columns)])
    x = x[:rows]
    found = run(quantized(x), weight)
    assert [program.name for program in emulator.launches] == ["quantize", "linear_many"]
    assert dict(emulator.launches[-1].macros)["NARROW"] == str(int(rows <= 64))
    for row in (0, 31, 49, rows - 1):
        assert np.array_equal(run(quantized(x[row : row + 1]), weight)[0], found[row])


@pytest.mark.parametrize("name", ["q4_k", "nvfp4", "int8-g32"])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("fine", [False, True])
def test_many_rows_in_blocks(
    emulator: Emulator, name: str, gate: str | None, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks either way, of which the last lack rows, and more than fit the cache."""
    monkeypatch.setattr(launch, "_CACHED_ROWS", 128)
    rows = [inputs(count, 1280) for count in (41, 64, 64)]
    weight, x = matrix(name, 160, 1280), torch.cat(rows)
    found = run(quantized(x, fine=fine), weight, gate=gate)
    assert emulator.launches[-1].name == "linear_many"
    some = [0, 40, 41, 168]
    assert np.array_equal(run(quantized(x[some], fine=fine), weight, gate=gate), found[some])


@pytest.mark.parametrize("columns", [512, 896, 1024])  # 4, 7 and 8 chains
def test_work_may_be_cut_anyhow(emulator: Emulator, columns: int) -> None:
    weight, x = matrix("q4_0", 40, columns), quantized(inputs(5, columns))
    whole = run(x, weight)
    cuts = [LaunchShape(pairs, 1, parts) for pairs in (1, 2) for parts in (1, 2, 4)]
    assert all(np.array_equal(run(x, weight, division=division), whole) for division in cuts)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("rows", [1, 6])
def test_gates(emulator: Emulator, gate: Any, rows: int) -> None:
    weight, x = matrix("mxfp4", 96, 256), quantized(inputs(rows, 256) * 4)
    g, up = np.split(values_of(x) @ weight.values.T, 2, axis=1)
    wanted = gated(g, up, ExpertSpec(activation=gate, limit=7.0))
    for division in (LaunchShape(1, 1), LaunchShape(2, 1), LaunchShape(1, 1, 2)):
        assert error(run(x, weight, division=division, gate=gate), wanted) < 1e-5


def test_bias(emulator: Emulator) -> None:
    weight, x = matrix("nvfp4", 40, 256), quantized(inputs(2, 256))
    wide, bias = there(torch.zeros(2, 100)), torch.randn(40)
    product(x, weight, wide[:, 30:70], bias=there(bias))
    out = wide.to_host()
    assert error(out[:, 30:70], values_of(x) @ weight.values.T + bias.numpy()) < 1e-6
    assert not out[:, :30].any()
    assert not out[:, 70:].any()


def test_a_matrix_for_each_head(emulator: Emulator) -> None:
    weight, x = matrix("q8_0", 96, 64), there(torch.randn(3, 70, 64))
    few, out = (there(torch.zeros(3, rows, 32, dtype=torch.bfloat16)) for rows in (5, 70))
    product(quantize(x[:, :5]), weight, few)
    product(quantize(x), weight, out)
    assert torch.equal(back(out)[:, :5], back(few))
    heads = weight.values.reshape(3, 32, 64)
    for head in range(3):
        wanted = values_of(quantize(x[head])) @ heads[head].T
        assert error(out.to_host()[head], wanted) < 5e-3
