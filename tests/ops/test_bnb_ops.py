"""NF4 through bitsandbytes, on the CPU: the same numbers as our own reference."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.formats import NF4, PackedTensor, pack, unpack
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.bitsandbytes_ops import BnbOps, BnbWeight

pytestmark = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
    pytest.mark.filterwarnings("ignore"),  # it warns of kernels that it would rather have
]

ROWS, COLUMNS = 40, 128


@pytest.fixture
def packed() -> PackedTensor:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    return pack(values, NF4, name="w")


@pytest.mark.parametrize("rows", [1, 5])
def test_products(packed: PackedTensor, rows: int) -> None:
    ops = BnbOps(device="cpu")
    half = ROWS // 2
    parts = [packed.take_rows(np.arange(half)), packed.take_rows(np.arange(half, ROWS))]
    weight = ops.weight((ROWS, COLUMNS), parts)
    assert isinstance(weight, BnbWeight)
    assert weight.nbytes == ops.weight_nbytes((ROWS, COLUMNS), NF4)
    x = torch.randn(rows, COLUMNS).bfloat16()
    with ops.scope():
        got = ops.linear(x, weight).float().numpy()
    wanted = x.float().numpy() @ unpack(packed).T
    assert np.abs(got - wanted).max() < 0.01 * np.abs(wanted).max()


def test_tiles_and_rows_of_an_embedding(packed: PackedTensor) -> None:
    ops = BnbOps(device="cpu")
    table = ops.weight((ROWS, COLUMNS), [tile_tensor(packed)])
    cache: Any = ops.kv_cache([], 8)
    with ops.scope():
        step = ops.begin(Batch.extend([(cache, [3, 39, 3])]))
        got = ops.embed(table, step).float().numpy()
    wanted = unpack(packed)[[3, 39, 3]]
    assert np.abs(got - wanted).max() < 0.01 * np.abs(wanted).max()


def test_other_formats_are_unpacked(packed: PackedTensor) -> None:
    ops = BnbOps(device="cpu")
    rotated = ops.weight((ROWS, COLUMNS), [tile_tensor(packed, hadamard=64)])
    assert isinstance(rotated, torch.Tensor)
    assert rotated.dtype == torch.bfloat16
