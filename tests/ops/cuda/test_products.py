"""Products with packed and bf16 weights: against float64, bit for bit among each other, and with
the changes of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.cuda import launch
from localrt.quant.cuda.formats import TYPES
from localrt.quant.cuda.launch import LaunchShape
from localrt.quant.cuda.linear import linear
from localrt.quant.cuda.products import (
    MOST_ROWS,
    Records,
    TiledMatrix,
    dense_product,
    product,
    quantize,
    unpack_rows,
)
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, empty, upload
from localrt.quant.cuda.weight import build_weight, is_e4m3_groups, unpack_e4m3
from localrt.quant.formats import FORMATS, unpack
from localrt.quant.formats.tiled import TiledTensor, tile, tile_span, tile_tensor
from localrt.quant.ops.experts import ExpertSpec
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE, by_torch, random, there, tiles_of
from tests.ops.oracles import gated
from tests.ops.packed import random_tensor

# NF4's levels are 127ths.
TOLERANCE = {name: 8e-3 if name.startswith(("nf4", "fp4-f32")) else 1e-6 for name in TYPES}
# One of each kind of code, of scale and of span.
SOME = (
    *("q2_k", "q4_0", "q4_k", "q5_1", "q6_k", "q8_0"),
    *("iq3_s", "iq2_xs", "iq1_m", "mxfp4", "nvfp4", "nf4"),
)
EACH = [pytest.param(n, marks=() if n in SOME else pytest.mark.slow) for n in sorted(TYPES)]


@dataclass(frozen=True)
class Matrix(TiledMatrix):
    """With what its bytes stand for: (rows, columns), float64."""

    values: Any = None


def matrix(name: str, rows: int, columns: int, seed: int = 0) -> Matrix:
    tensor = random_tensor(name, rows, columns, seed)
    tiles = tiles_of(tensor)
    values = unpack(tensor).astype(np.float64)
    return Matrix(name, (rows, columns), tiles.data, tiles.factor, values)


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


def columns_of(name: str) -> int:
    """No whole turns of the kernel's loop."""
    return 3 * 256 if tile_span(FORMATS[name]) == 256 else 384 + tile_span(FORMATS[name])


# -- rows as records -------------------------------------------------------------------------------


@pytest.mark.parametrize(("fine", "steps"), [(False, 127), (True, 32384)])
def test_records_are_within_half_a_step(emulator: Emulator, fine: bool, steps: int) -> None:
    x = random(3, 96)
    x[1, :32] = 0
    records = quantized(x, fine=fine)
    found = values_of(records)
    step = np.abs(x.numpy()).reshape(3, -1, 32).max(-1) / steps
    assert (np.abs(found - x.numpy()).reshape(3, -1, 32).max(-1) <= step * 0.51).all()
    if not fine:  # beside a record's numbers: the same times -1, and the sum of each step
        each = records.data.to_host().reshape(1, 8, 2, 144)[0, :3]
        assert np.array_equal(each[..., 64:128].view(np.int8), -each[..., :64].view(np.int8))
        sums = np.ascontiguousarray(each[..., 128:]).view(np.float32).reshape(3, 4, 2)[:, :3, 1]
        assert np.allclose(sums, found.reshape(3, 3, 32).sum(-1), rtol=1e-5, atol=1e-5)


# -- packed weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
def test_every_format(emulator: Emulator, name: str) -> None:
    """One row is float64's product; 50 or 70 in blocks of 64, 96 or 128 have the bits of one; and
    unpacked rows are the reference exactly.
    """
    columns = columns_of(name)
    weight, x = matrix(name, 24, columns), random(70, columns)
    one = quantized(x[:1])
    assert error(run(one, weight), values_of(one) @ weight.values.T) < TOLERANCE[name]
    for rows in (50, 70) if name in SOME else (50,):
        emulator.launches.clear()
        found = run(quantized(x[:rows]), weight)
        if not DEVICE.is_gpu:
            assert [program.name for program in emulator.launches] == ["quantize", "linear_many"]
            assert dict(emulator.launches[-1].macros)["NARROW"] == str(int(rows <= 64))
        for row in (0, 31, 49, rows - 1):
            assert np.array_equal(run(quantized(x[row : row + 1]), weight)[0], found[row])
    off = float(np.abs(weight.values).max()) / 250 if TOLERANCE[name] > 1e-6 else 0.0
    some = empty(15, columns, device=DEVICE)
    unpack_rows(weight, some, first=9)
    assert np.abs(some.to_host() - weight.values[9:]).max() <= off
    if name in ("q4_0", "q6_k", "nvfp4", "nf4"):  # for an index: another kernel
        index = torch.tensor([3, 23, 17, 17])
        picked = empty(4, columns, device=DEVICE)
        unpack_rows(weight, picked, index=there(index), factor=2.0)
        assert np.abs(picked.to_host() - 2 * weight.values[index]).max() <= 2 * off


@pytest.mark.parametrize("name", SOME)
def test_batch_invariance(emulator: Emulator, name: str) -> None:
    weight, x = matrix(name, 32, 768), random(41, 768)
    alone = [run(quantized(x[i : i + 1]), weight)[0] for i in range(3)]
    for rows in (8, 11) if name != "q4_0" else (2, 4, 5, 8, 16, 17, 41):
        found = run(quantized(x[:rows]), weight)
        assert np.array_equal(found[: min(3, rows)], alone[: min(3, rows)]), rows
    emulator.seed += 1  # another order of threads and blocks
    assert np.array_equal(run(quantized(x[:3]), weight), np.stack(alone))


@pytest.mark.parametrize(("name", "gate"), [("q4_0", None), ("nf4", None), ("q4_k", "silu")])
def test_fine_batch_invariance(emulator: Emulator, name: str, gate: str | None) -> None:
    weight, x = matrix(name, 64, 768), random(9, 768)
    alone = [run(quantized(x[i : i + 1], fine=True), weight, gate=gate)[0] for i in range(2)]
    wanted = x[0].numpy().astype(np.float64) @ weight.values.T
    if gate:
        wanted = gated(wanted[:32], wanted[32:], ExpertSpec(limit=7.0))
    assert error(alone[0], wanted) < max(1e-3, TOLERANCE[name])
    for rows in (2, 3, 9):
        found = run(quantized(x[:rows], fine=True), weight, gate=gate)
        assert np.array_equal(found[:2], alone)


@pytest.mark.parametrize(
    ("name", "gate", "fine"),
    [("q4_k", None, False), ("nvfp4", "silu", False), ("int8-g32", "silu", True)],
)
def test_many_rows_in_blocks(
    emulator: Emulator, name: str, gate: str | None, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks either way, of which the last lack rows, and more than fit the cache."""
    monkeypatch.setattr(launch, "_CACHED_ROWS", 128)
    weight, x = matrix(name, 160, 1280), random(169, 1280)
    found, some = run(quantized(x, fine=fine), weight, gate=gate), [0, 40, 41, 168]
    assert np.array_equal(run(quantized(x[some], fine=fine), weight, gate=gate), found[some])


@pytest.mark.parametrize("columns", [512, 896, 1024])  # 4, 7 and 8 chains
def test_work_may_be_cut_anyhow(emulator: Emulator, columns: int) -> None:
    weight, x = matrix("q4_0", 40, columns), quantized(random(5, columns))
    whole = run(x, weight)
    cuts = [LaunchShape(pairs, 1, parts) for pairs in (1, 2) for parts in (1, 2, 4)]
    assert all(np.array_equal(run(x, weight, division=division), whole) for division in cuts)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("rows", [1, 6])
def test_gates(emulator: Emulator, gate: Any, rows: int) -> None:
    weight, x = matrix("mxfp4", 96, 256), quantized(random(rows, 256) * 4)
    g, up = np.split(values_of(x) @ weight.values.T, 2, axis=1)
    wanted = gated(g, up, ExpertSpec(activation=gate, limit=7.0))
    for division in (LaunchShape(1, 1), LaunchShape(2, 1), LaunchShape(1, 1, 2)):
        assert error(run(x, weight, division=division, gate=gate), wanted) < 1e-5


def test_extreme_scales() -> None:
    """Exponent 0 of MXFP4, subnormal scales of NVFP4, and a scale of zero."""
    mx = random_tensor("mxfp4", 16, 64)
    mx.data.reshape(16, 2, 17)[:, 0, 0] = 0
    nv = random_tensor("nvfp4", 16, 64)
    nv.data.reshape(16, 4, 9)[:, :, 0] = [[0, 1, 7, 126]] * 16
    for tensor in (mx, nv):
        out = empty(16, 64, device=DEVICE)
        unpack_rows(tiles_of(tensor), out)
        assert np.array_equal(out.to_host(), unpack(tensor))


# -- other weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 9, 70, 130])
@pytest.mark.parametrize("columns", [352, 43])
def test_bf16_weights(batch: int, columns: int) -> None:
    w, x = random(50, columns, seed=1).bfloat16(), random(batch, columns).bfloat16()
    out = empty(batch, 50, device=DEVICE)
    dense_product(there(x), there(w), out)
    assert error(out.to_host(), (x.double() @ w.double().T).numpy()) < 2e-5
    # Products of many rows on tensor cores have an order of sums of their own.
    fewer = x[-65:] if batch > MOST_ROWS else x[-1:]
    alone = empty(len(fewer), 50, device=DEVICE)
    dense_product(there(fewer), there(w), alone)
    assert np.array_equal(alone.to_host()[-1], out.to_host()[-1])


@pytest.mark.parametrize("columns", [8, 360])
def test_many_rows_of_bf16(columns: int) -> None:
    """Also where rows lie apart, and columns are no whole steps."""
    w, x = random(200, columns, seed=1).bfloat16(), random(300, columns + 24).bfloat16()
    out, bias = empty(300, 456, device=DEVICE), torch.randn(200)
    rows, own = there(x)[:, 8 : columns + 8], out[:, 128:328]
    dense_product(rows, there(w), own, bias=there(bias))
    wanted = x[:, 8 : columns + 8].double() @ w.double().T + bias.double()
    assert error(own.to_host(), wanted.numpy()) < 2e-5
    short = empty(300, 200, dtype=BFLOAT16, device=DEVICE)
    dense_product(rows, there(w), short)
    assert error(short.to_host() + bias.numpy(), wanted.numpy()) < 1e-2


def test_joined_matrices() -> None:
    """Queries, keys and values of a unit on the GPU; another format is a product of its own."""
    tensors = [random_tensor(name, 32, 256, seed) for seed, name in enumerate(["nvfp4"] * 3)]
    tensors += [random_tensor("q6_k", 16, 256)]
    data = upload(np.concatenate([tile(tensor) for tensor in tensors]), DEVICE)
    blocks, at = [], 0
    for number, tensor in enumerate(tensors):
        size = tile(tensor).size
        lies: Any = data[at : at + size]
        shape = (tensor.shape[0], tensor.shape[1])
        blocks.append(TiledTensor(f"{number}", tensor.format, shape, lies, tensor.scale))
        at += size
    weight = build_weight((112, 256), iter(blocks), DEVICE)
    assert [part.shape[0] for part in weight.parts] == [96, 16]
    first: Any = weight.parts[0]
    assert first.data.address == data.address, "it is used where it lies"
    x = there(random(2, 256).bfloat16())
    out = linear(x, weight, dtype=FLOAT32)
    values = np.concatenate([unpack(tensor) for tensor in tensors]).astype(np.float64)
    assert error(out.to_host(), quantize(x).values()[0] @ values.T) < 1e-6


@pytest.mark.parametrize("name", ["e4m3-g128", "e4m3-g64", "e4m3-g32"])
def test_tiles_of_e4m3_become_bf16(name: str) -> None:
    tensor = replace(random_tensor(name, 37, 384), scale=0.75)
    groups = tensor.data.reshape(-1, tensor.format.block_bytes)
    groups[: 256 // tensor.format.block, 4:] = np.arange(256).reshape(-1, tensor.format.block)
    tiled = tile_tensor(tensor)
    assert is_e4m3_groups(tiled)
    found = torch.empty(37, 384, dtype=torch.bfloat16)
    by_torch(unpack_e4m3)(tiled, torch.from_numpy(tiled.data), found)
    wanted = torch.from_numpy(unpack(tensor)).bfloat16()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    for other in ("int8-g32", "bf16"):
        assert not is_e4m3_groups(tile_tensor(random_tensor(other, 16, 32)))
