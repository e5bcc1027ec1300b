"""Adapters of a model whose units lie on both sides: every lane adds what is its own."""

from __future__ import annotations

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.offload.placement import Where
from localrt.quant.ops.adapters import Adapter, LowRank
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import relative_error
from tests.offload.gpu.test_cuda_path import BOUND, all_in_turn, emulated, model, on_cuda
from tests.offload.placed import Model, needs_kernels, passing

__all__ = ["emulated", "model"]  # fixtures

pytestmark = needs_kernels

IDS = [5, 6, 7]


def adapter_of(model: Model) -> Adapter[LowRank]:
    rng = np.random.default_rng(0)

    def part(rows: int, columns: int) -> LowRank:
        a, b = rng.normal(0, 0.3, (4, columns)), rng.normal(0, 0.3, (rows, 4))
        return LowRank(a.astype(np.float32), b.astype(np.float32), None)

    shapes = {n: i.shape for n, i in model.store.tensors.items() if "layers" in n}
    matrices = {n: part(s[0], s[1]) for n, s in shapes.items() if len(s) == 2}
    return Adapter("key", matrices, part(64, 64), part(64, 64))


def add(decoder: Decoder, adapter: Adapter[LowRank]) -> None:
    for ops in decoder.weights.implementations:
        assert ops.adapters is not None
        ops.adapters.add(ops.adapters.packed(adapter))


def fresh(decoder: Decoder, *keys: str) -> KVCache:
    cache = decoder.cache(16)
    cache.mix = tuple((key, 1.0) for key in keys)
    return cache


@pytest.mark.parametrize("mlps_only", [False, True])
def test_lanes_add_their_own(model: Model, mlps_only: bool) -> None:
    adapter = adapter_of(model)
    where = all_in_turn(model)
    if mlps_only:  # the GPU's lane attends to nothing
        names = passing(model.store)
        where = {n: Where.VRAM if n.endswith(".mlp") else Where.RAM for n in names}
    add(model.resident, adapter)
    wanted = model.resident.forward(Batch.extend([(fresh(model.resident, "key"), IDS)]))
    plain = model.resident.forward(Batch.extend([(fresh(model.resident), IDS)]))
    with on_cuda(model, where) as decoder:
        first = decoder.forward(Batch.extend([(fresh(decoder), IDS)]))
        assert relative_error(first, plain) < BOUND
        add(decoder, adapter)
        for _ in range(2):
            got = decoder.forward(Batch.extend([(fresh(decoder, "key"), IDS)]))
            assert relative_error(got, wanted) < BOUND
            assert relative_error(got, plain) > 2 * BOUND
            # Others find nothing of it, in a pass of their own and beside it.
            again = decoder.forward(Batch.extend([(fresh(decoder), IDS)]))
            np.testing.assert_array_equal(again, first)
        both = [(fresh(decoder), IDS), (fresh(decoder, "key"), IDS)]
        together = decoder.forward(Batch.extend(both))
        np.testing.assert_array_equal(together, np.concatenate([first, got]))
        for ops in decoder.weights.implementations:
            assert ops.adapters is not None
            ops.adapters.remove("key")
        np.testing.assert_array_equal(decoder.forward(Batch.extend([(fresh(decoder), IDS)])), first)
    assert model.resident.ops.adapters is not None
    model.resident.ops.adapters.remove("key")
