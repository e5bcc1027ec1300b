"""E4M3 codes on the device, as the reference unpacks them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localrt.quant.cuda.weight import is_e4m3_groups, unpack_e4m3
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import tile_tensor
from tests.ops.packed import random_tensor


@pytest.mark.parametrize("name", ["e4m3-g128", "e4m3-g64", "e4m3-g32"])
def test_tiles_of_e4m3_become_bf16(name: str) -> None:
    tensor = replace(random_tensor(name, 37, 384), scale=0.75)
    tiled = tile_tensor(tensor)
    assert is_e4m3_groups(tiled)
    found = unpack_e4m3(tiled, torch.from_numpy(tiled.data))
    assert torch.equal(found, torch.from_numpy(unpack(tensor)).bfloat16())


def test_other_formats_are_none_of_it() -> None:
    assert not is_e4m3_groups(tile_tensor(random_tensor("int8-g32", 16, 32)))
    assert not is_e4m3_groups(tile_tensor(random_tensor("bf16", 16, 32)))
