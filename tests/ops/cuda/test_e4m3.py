"""E4M3 codes on the device, as the reference unpacks them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from localrt.quant.cuda.weight import is_e4m3_groups, unpack_e4m3
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import tile_tensor
from tests.ops.cuda.target import by_torch
from tests.ops.packed import random_tensor


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
