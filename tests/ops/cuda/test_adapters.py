"""Adapters in passes of the GPU's kernels: what they add, and that others' bits stay."""

from __future__ import annotations

from ctypes import Array
from typing import Any

import pytest
import torch

from localrt.quant.cuda.adapters import Change, adapted_products, add_low_rank
from localrt.quant.cuda.launch import LaunchShape, pointers
from localrt.quant.cuda.products import AdaptedRows, product, quantize
from localrt.quant.cuda.steps import gate as gated
from tests.ops.cuda.target import back, by_torch, there
from tests.ops.cuda.test_products import matrix


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
        made = by_torch(adapted_products)(numbers, places, records or x, parts=2, rank=40)
        by_torch(add_low_rank)(made, y, bias, fine=form == "fine")

    change(changes, places, y)
    close = {"rtol": 1e-2, "atol": 1e-1} if out == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(y.float(), wanted, **close)
    for row in range(1, 4):  # a row at a time, to the same bits
        few, one = (Change * 4)(*changes), torch.full_like(places, -1)
        few[2 if row == 1 else 1], one[row] = Change(), places[row]
        change(few, one, alone)
    assert torch.equal(alone, y)


SHAPES = LaunchShape(1, 1), LaunchShape(1, 1, 4), LaunchShape(1, 2, 2)


@pytest.mark.parametrize("rows", [1, 6, 20])
@pytest.mark.parametrize(
    ("form", "gate", "matrices"),
    [("bf16", None, 1), ("records", None, 2), ("fine", None, 2), ("records", "silu", 1)],
)
def test_products_apply_changes(form: str, gate: str | None, matrices: int, rows: int) -> None:
    """To the bits of two kernels after the product, however it is launched."""
    torch.manual_seed(0)
    columns, width, ranks = 768, 96, (3, 16)
    x = there(torch.randn(rows, columns).bfloat16())
    records = quantize(x, fine=form == "fine")
    seen = x if form == "bf16" else records
    each = width // matrices
    weights = [matrix("int4-g32", each, columns, seed) for seed in range(matrices)]
    bias = None if gate else there(torch.randn(width))
    factors = there(torch.rand(48))
    a = [there(torch.randn(rank, columns).bfloat16()) for rank in ranks]
    b = [there(torch.randn(48, rank).bfloat16()) for rank in ranks]
    # The second adapter changes the second half alone; a third one nothing.
    first, second = pointers(a[0], b[0], factors), pointers(a[1], b[1], None)
    table = (Change * 6)(Change(*first, 3, 48, 0), Change(), Change())
    table[3], table[4] = Change(*second, 16, 48, 48), Change(*first, 3, 48, 48)
    changes = there(torch.frombuffer(bytearray(table), dtype=torch.uint8))
    places = there(torch.tensor([(0, 1, -1, 2)[row % 4] for row in range(rows)], dtype=torch.int32))

    def made(out: torch.dtype, **options: Any) -> Any:
        y = there(torch.zeros(rows, width // 2 if options.get("gate") else width, dtype=out))
        for number, weight in enumerate(weights):
            part = slice(number * each, (number + 1) * each)
            own = None if bias is None else bias[part]
            product(records, weight, y if gate else y[:, part], bias=own, **options)
        return y

    def change() -> AdaptedRows:
        return adapted_products(changes, places, seen, parts=2, rank=16)

    for out in (torch.bfloat16,) if gate else (torch.bfloat16, torch.float32):
        wanted = made(torch.float32 if gate else out)
        before = back(wanted)
        add_low_rank(change(), wanted, bias, fine=form == "fine")
        assert not torch.equal(back(wanted), before)
        if gate:
            wanted = gated(wanted, gate)
        for shape in SHAPES:
            found = made(out, gate=gate, change=change(), division=shape)
            assert torch.equal(back(found), back(wanted))
