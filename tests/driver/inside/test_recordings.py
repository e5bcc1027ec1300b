"""Which shapes of passes are recorded on the driver."""

from __future__ import annotations

import pytest

from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.graph import Recordings, StaticPass, StaticStep
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.stream import CudaPass, Stream
from localrt.quant.cuda.tensor import zeros
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import RECORDED_PARTS, Batch
from tests.driver.inside.conftest import Kernels


@pytest.fixture
def recordings(gpu: Kernels) -> Recordings:
    return Recordings(CudaOps(device="cuda"))


@pytest.fixture
def cache(gpu: Kernels) -> KVCache:
    spec = AttentionSpec(
        heads=1, kv_heads=1, head_dim=8, eps=1e-6, rope=None, scale=1.0, window=None
    )
    return CudaOps(device="cuda").kv_cache([spec], 600)


def recorded(recordings: Recordings, cache: KVCache, rows: int) -> object:
    """What a pass of so many rows reads its inputs from."""
    step = recordings.begin(Batch.extend([(cache, [1] * rows)]), range(rows))
    return static_of(step) if recordings.takes(step, "all", 1) else None


def static_of(step: CudaPass) -> StaticPass:
    assert isinstance(step, StaticStep)
    return step.static


def test_a_shape_is_recorded_the_second_time(recordings: Recordings, cache: KVCache) -> None:
    assert recorded(recordings, cache, 1) is None
    first = recorded(recordings, cache, 1)
    assert first is not None
    assert recorded(recordings, cache, 2) is None
    assert recorded(recordings, cache, 1) is first
    recordings.forget()
    assert recorded(recordings, cache, 1) is None


def test_a_pass_records_few_parts(recordings: Recordings, cache: KVCache) -> None:
    """The others are computed step by step until a later pass."""
    batch, most = Batch.extend([(cache, [1])]), RECORDED_PARTS
    parts = [("a", most - 6), ("b", 6), ("c", 1), ("d", 2 * most)]
    zero = zeros(1, 8, device=device_of("cuda"))
    recordings.begin(batch, [0])
    taken = list[str]()
    for _ in range(4):
        step = recordings.begin(batch, [0])
        taken.append("".join(key for key, size in parts if recordings.takes(step, key, size)))
        for key in taken[-1]:
            recordings.run(step, Stream(zero), key, lambda step, x: x)
    assert taken == ["ab", "abc", "abcd", "abcd"]
    recordings.forget("b")
    step = recordings.begin(batch, [0])
    assert static_of(step).has("a")
    assert not static_of(step).has("b")


def test_passes_that_take_longer(recordings: Recordings, cache: KVCache) -> None:
    """They are counted: the first of a shape, and those that record."""
    zero, seen = zeros(1, 8, device=device_of("cuda")), list[int]()
    for _ in range(4):
        before = device_of("cuda").fresh_passes
        step = recordings.begin(Batch.extend([(cache, [1])]), [0])
        if recordings.takes(step, "all", 1):
            recordings.run(step, Stream(zero), "all", lambda step, x: x)
        seen.append(device_of("cuda").fresh_passes - before)
    assert seen == [1, 1, 0, 0]


def test_many_shapes(recordings: Recordings, cache: KVCache) -> None:
    rounds = [[recorded(recordings, cache, rows) for rows in range(1, 21)] for _ in range(5)]
    assert not any(rounds[0])
    assert rounds[1] == rounds[2] == rounds[4]
    assert sum(found is not None for found in rounds[4]) == 8
    # What has not come for long gives way.
    for _ in range(100):
        recorded(recordings, cache, 20)
    assert recorded(recordings, cache, 20) is not None
