"""Adapters in passes of the GPU's kernels: what they add, and that others' bits stay."""

from __future__ import annotations

from ctypes import Array
from pathlib import Path

import numpy as np
import pytest
import torch

from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.adapters import Change, add_low_rank
from localrt.quant.cuda.graph import GraphedForward
from localrt.quant.cuda.launch import pointers
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.products import quantize
from localrt.quant.ops.adapters import Adapter, LowRank
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.models.test_adapters import KINDS, Tiny, cache, run
from tests.models.tiny import relative_error, tokens
from tests.ops.cuda.target import DEVICE, by_torch, there
from tests.ops.cuda.test_models import Packed


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
    changes = (Change * 2)(
        Change(*pointers(*held[:3]), 3, 300, 1, 1, 0),
        Change(*pointers(*held[3:]), None, 40, 20, 2, 2, 270),
    )
    wanted = y.float().clone()
    wanted[1] = (wanted[1] - bias) * factors + bias + b[0].float() @ (a[0].float() @ seen[1])
    wanted[2:, 270:290] += seen[2:] @ a[1].float().T @ b[1].float().T

    def change(array: Array[Change], y: torch.Tensor) -> None:
        numbers = torch.frombuffer(bytearray(array), dtype=torch.uint8)
        sizes = {"columns": columns, "count": 2, "rank": 40, "rows": 300}
        by_torch(add_low_rank)(numbers, records or x, y, **sizes, bias=bias)

    change(changes, y)
    close = {"rtol": 1e-2, "atol": 1e-1} if out == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(y.float(), wanted, **close)
    for each in changes:  # a row at a time, to the same bits
        for row in range(each.row, each.row + each.count):
            one = Change(each.a, each.b, each.factors, each.rank, each.rows, row, 1, each.first)
            change((Change * 1)(one), alone)
    assert torch.equal(alone, y)


def on_gpu(tiny: Tiny, *adapters: Adapter[LowRank]) -> Decoder:
    ops = CudaOps(device=str(DEVICE))
    source = Packed(tiny.checkpoint, "int8-g32")
    decoder = load_decoder(source, ops, read_config(tiny.checkpoint))  # type: ignore[arg-type]
    for adapter in adapters:
        ops.adapters.add(ops.adapters.packed(adapter))
    return decoder


@pytest.mark.parametrize("kind", ["dora", "ranks", "tokens"])
def test_a_gpu_adds_what_torch_does(kind: str, tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapter, _ = tiny.adapter("a", **KINDS[kind])
    ids = tokens(4)
    exact = tiny.decoder(TorchOps(compute_format="f32"), adapter)
    gpu = on_gpu(tiny, adapter)
    plain = relative_error(run(gpu, cache(gpu), ids), run(exact, cache(exact), ids))
    wanted = run(exact, cache(exact, adapter), ids)
    assert relative_error(run(gpu, cache(gpu, adapter), ids), wanted) < max(3 * plain, 2e-2)


def test_adapters_by_row(tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapters = [tiny.adapter("a", 1, r=3)[0], tiny.adapter("b", 2, r=9, use_dora=True)[0]]
    gpu = on_gpu(tiny, *adapters)
    plain = on_gpu(tiny)
    ids = [tokens(2, n) for n in range(4)]
    mixes: list[tuple[Adapter[LowRank], ...]] = [(), (adapters[0],), (adapters[1],), ()]
    alone = [
        run(gpu if mix else plain, cache(gpu if mix else plain, *mix), each)
        for mix, each in zip(mixes, ids, strict=True)
    ]
    caches = [cache(gpu, *mix) for mix in mixes]
    together = gpu.forward(Batch.extend(list(zip(caches, ids, strict=True))))
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_long_passes_and_recordings(tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapter, _ = tiny.adapter("a", 1)
    gpu = on_gpu(tiny, adapter)
    ids = tokens(66)
    whole, long = gpu.cache(80), gpu.cache(80)
    whole.mix = long.mix = ((adapter.key, 1.0),)
    wanted = run(gpu, whole, ids[:60])
    rest = run(gpu, whole, ids[60:])
    got = run(gpu, long, ids)  # a prompt's rows
    assert relative_error(got[60:], rest) < 4e-2
    assert relative_error(got[:60], wanted) < 4e-2

    forward = GraphedForward(gpu.ops, gpu.forward)  # type: ignore[arg-type]
    made, adapted = cache(gpu), cache(gpu, adapter)
    before = [forward(Batch.extend([(made, [5])]))]
    forward(Batch.extend([(adapted, [5])]))
    for _ in range(3):  # the second time it is recorded
        made.trim(0)
        before.append(forward(Batch.extend([(made, [5])])))
        adapted.trim(0)
        again = forward(Batch.extend([(adapted, [5])]))
        assert relative_error(again, before[0]) > 1e-3
    for each in before[1:]:
        np.testing.assert_array_equal(each, before[0])
    gpu.ops.adapters.remove(adapter.key)  # type: ignore[union-attr]
    np.testing.assert_array_equal(run(gpu, cache(gpu), [5]), before[0])
