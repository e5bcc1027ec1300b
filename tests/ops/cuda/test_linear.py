"""Unpacked rows, and products with bf16 weights, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localrt.common.errors import MemoryBudgetError
from localrt.quant.cuda import cublas
from localrt.quant.cuda.formats import TYPES
from localrt.quant.cuda.linear import linear
from localrt.quant.cuda.products import MOST_ROWS, dense_product, quantize, unpack_rows
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, empty, upload
from localrt.quant.cuda.weight import build_weight, is_e4m3_groups, unpack_e4m3
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import TiledTensor, tile, tile_tensor
from tests.ops.cuda.target import DEVICE, back, by_torch, there, tiles_of
from tests.ops.packed import random_tensor

PICKED = ("q4_0", "q6_k", "nvfp4", "nf4")  # for an index: another kernel, which unpacks alike


def inputs(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16()


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", sorted(TYPES))
def test_rows_are_the_reference_exactly(name: str) -> None:
    tensor = random_tensor(name, 53, 256)
    values = torch.from_numpy(unpack(tensor))
    tiles = tiles_of(tensor)
    off = float(values.abs().max()) / 250 if name.startswith(("nf4", "fp4-f32")) else 0.0
    some = empty(20, 256, device=DEVICE)
    unpack_rows(tiles, some, first=9)
    assert (back(some) - values[9:29]).abs().max() <= off
    if name in PICKED:
        index = torch.tensor([3, 52, 17, 17])
        picked = empty(4, 256, device=DEVICE)
        unpack_rows(tiles, picked, index=there(index), factor=2.0)
        assert (back(picked) - 2 * values[index]).abs().max() <= 2 * off


@pytest.mark.parametrize("batch", [1, 9, 40, 70, 130])
@pytest.mark.parametrize("columns", [352, 43])
def test_bf16_weights(batch: int, columns: int) -> None:
    w = inputs(50, columns, seed=1)
    x = inputs(batch, columns)
    out = empty(batch, 50, device=DEVICE)
    dense_product(there(x), there(w), out)
    assert error(out.to_host(), (x.double() @ w.double().T).numpy()) < 2e-5
    # Products of many rows on tensor cores have an order of sums of their own.
    fewer = x[-65:] if batch > MOST_ROWS else x[-1:]
    alone = empty(len(fewer), 50, device=DEVICE)
    dense_product(there(fewer), there(w), alone)
    assert np.array_equal(alone.to_host()[-1], out.to_host()[-1])


@pytest.mark.parametrize("columns", [8, 40, 96, 360])
def test_many_rows_of_bf16(columns: int) -> None:
    """Also where rows lie apart, and columns are no whole steps."""
    w, x, bias = inputs(200, columns, seed=1), inputs(300, columns + 24), torch.randn(200)
    out = empty(300, 456, device=DEVICE)
    rows, own = there(x)[:, 8 : columns + 8], out[:, 128:328]
    dense_product(rows, there(w), own, bias=there(bias))
    wanted = x[:, 8 : columns + 8].double() @ w.double().T + bias.double()
    assert error(own.to_host(), wanted.numpy()) < 2e-5
    short = empty(300, 200, dtype=BFLOAT16, device=DEVICE)
    dense_product(rows, there(w), short)
    assert error(short.to_host() + bias.numpy(), wanted.numpy()) < 1e-2


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
    x = there(inputs(2, 256))
    out = linear(x, weight, dtype=FLOAT32)
    values = np.concatenate([unpack(tensor) for tensor in tensors]).astype(np.float64)
    assert error(out.to_host(), quantize(x).values()[0] @ values.T) < 1e-6


@pytest.mark.parametrize(
    ("rotations", "rows", "message"),
    [
        ((0, 32), 32, "share their input's rotation"),
        ((32, 32), 16, "more rows than the matrix has"),
        ((32, 32), 48, "blocks hold 32 rows, the matrix has 48"),
    ],
)
def test_blocks_that_do_not_fit(rotations: tuple[int, int], rows: int, message: str) -> None:
    packed = random_tensor("q4_0", 16, 64)
    blocks = [tile_tensor(packed, hadamard=rotation) for rotation in rotations]
    with pytest.raises(ValueError, match=message):
        build_weight((rows, 64), iter(blocks), DEVICE)


def test_no_memory_for_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    x, w = there(inputs(70, 64)), there(inputs(8, 64))
    out = empty(70, 8, dtype=BFLOAT16, device=DEVICE)
    monkeypatch.setattr(torch, "matmul", full)
    with pytest.raises(MemoryBudgetError, match="no room for products by cuBLAS"):
        cublas.multiply(x, w, out)


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


def test_other_formats_are_none_of_it() -> None:
    assert not is_e4m3_groups(tile_tensor(random_tensor("int8-g32", 16, 32)))
    assert not is_e4m3_groups(tile_tensor(random_tensor("bf16", 16, 32)))
