"""Adapters in passes of the GPU's kernels: what they add, and that others' bits stay."""

from __future__ import annotations

from ctypes import Array

import pytest
import torch

from localrt.quant.cuda.adapters import Change, add_low_rank
from localrt.quant.cuda.launch import pointers
from localrt.quant.cuda.products import quantize
from tests.ops.cuda.target import by_torch, there


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["bf16", "records", "fine"])
def test_low_rank_changes(form: str, out: torch.dtype) -> None:
    torch.manual_seed(0)
    columns, width, ranks = 96, 300, (3, 40)
    x = torch.randn(4, columns).bfloat16()
    records = None if form == "bf16" else quantize(there(x), fine=form == "fine")
    seen = x.float() if records is None else torch.from_numpy(records.values()[0]).float()
    y, bias = torch.randn(4, width).to(out), torch.randn(width)
    alone = y.clone()
    a = [torch.randn(rank, columns).bfloat16() for rank in ranks]
    b = [torch.randn(rows, rank).bfloat16() for rows, rank in ((300, 3), (20, 40))]
    factors = torch.rand(300)
    held = [there(each) for each in (a[0], b[0], factors, a[1], b[1])]
    # Two parts of the matrix, and two adapters, each of which changes one part.
    own, more = pointers(*held[:3]), pointers(*held[3:])
    changes = (Change * 4)(
        Change(), Change(*own, 3, 300, 0), Change(*more, None, 40, 20, 270), Change()
    )
    places = torch.tensor([-1, 1, 0, 0], dtype=torch.int32)
    wanted = y.float().clone()
    wanted[1] = (wanted[1] - bias) * factors + bias + b[0].float() @ (a[0].float() @ seen[1])
    wanted[2:, 270:290] += seen[2:] @ a[1].float().T @ b[1].float().T

    def change(array: Array[Change], places: torch.Tensor, y: torch.Tensor) -> None:
        numbers = torch.frombuffer(bytearray(array), dtype=torch.uint8)
        sizes = {"columns": columns, "parts": 2, "rank": 40, "rows": 300}
        by_torch(add_low_rank)(numbers, places, records or x, y, **sizes, bias=bias)

    change(changes, places, y)
    close = {"rtol": 1e-2, "atol": 1e-1} if out == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(y.float(), wanted, **close)
    for row in range(1, 4):  # a row at a time, to the same bits
        few, one = (Change * 4)(*changes), torch.full_like(places, -1)
        few[2 if row == 1 else 1], one[row] = Change(), places[row]
        change(few, one, alone)
    assert torch.equal(alone, y)
