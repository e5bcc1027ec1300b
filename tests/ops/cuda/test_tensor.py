"""Views of memory against numpy's, pools of memory against a list of what is taken."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.quant.cuda.device import Ram
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.memory import Pool, PoolBlock
from localrt.quant.cuda.tensor import (
    BFLOAT16,
    FLOAT32,
    UINT8,
    upload,
    zeros,
)
from localrt.quant.formats.convert import bf16_bits, bf16_values

RAM = device_of("cpu")
VALUES = np.arange(2 * 6 * 8, dtype=np.float32).reshape(2, 6, 8)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, 2),
        (0, slice(2, 5)),
        (slice(None), slice(1, 4), slice(3, None)),
        (slice(None), slice(None), slice(-3, None)),
        (1, slice(None), None, slice(0, 4)),
        (slice(None), 3),
        (slice(1, 1),),
    ],
)
def test_views(index: Any) -> None:
    there, wanted = upload(VALUES, RAM)[index], VALUES[index]
    assert there.shape == wanted.shape
    assert np.array_equal(there.to_host(), wanted)
    assert there.nbytes == wanted.nbytes


def test_shapes() -> None:
    there = upload(VALUES, RAM)
    assert np.array_equal(there.view(6, -1).to_host(), VALUES.reshape(6, 16))
    swapped = there.transpose(0, 1)
    assert np.array_equal(swapped.to_host(), VALUES.swapaxes(0, 1))
    assert not swapped.is_contiguous
    apart = there[:, :, :4]
    assert np.array_equal(apart.view(2, 6, 2, 2).to_host(), VALUES[:, :, :4].reshape(2, 6, 2, 2))
    assert np.array_equal(apart.view(12, 4).to_host(), VALUES[:, :, :4].reshape(12, 4))
    within = there[:, 1:5, :4]
    assert within.view(2, 2, 2, 1, 4).shape == (2, 2, 2, 1, 4)
    for refused, shape in ((within, (8, 4)), (swapped, (96,)), (there, (7, -1))):
        with pytest.raises(AssertionError):
            refused.view(*shape)


def test_types() -> None:
    there = upload(VALUES, RAM)
    assert np.array_equal(there.typed(UINT8).to_host(), VALUES.view(np.uint8))
    assert np.array_equal(there[0].typed(UINT8).typed(FLOAT32).to_host(), VALUES[0])


def test_bf16() -> None:
    values = np.random.default_rng(1).standard_normal((3, 40), np.float32)
    there = upload(bf16_bits(values), RAM, dtype=BFLOAT16)
    assert np.array_equal(there.to_host(), bf16_values(bf16_bits(values)))
    assert np.abs(there.to_host() - values).max() < 0.01
    assert np.array_equal(there.bits(), bf16_bits(values))


def test_copies() -> None:
    there, other = zeros(6, 8, device=RAM), upload(VALUES[0], RAM)
    assert not there.to_host().any()
    there.put(other)
    other.put(VALUES[1])
    assert np.array_equal(there.to_host(), VALUES[0])
    assert np.array_equal(other.to_host(), VALUES[1])
    with pytest.raises(AssertionError):
        there.put(VALUES)


class Slabs:
    """Memory far apart, or side by side, that knows what is out."""

    def __init__(self, most: int) -> None:
        self.most, self.next, self.out = most, 1 << 20, dict[int, int]()

    def alloc(self, nbytes: int) -> int:
        if sum(self.out.values()) + nbytes > self.most:
            raise MemoryError
        at = self.next
        self.next += nbytes
        self.out[at] = nbytes
        return at

    def free(self, address: int) -> None:
        del self.out[address]


@given(st.lists(st.tuples(st.integers(0, 40 << 20), st.integers(0, 7)), max_size=60))
def test_pools(steps: list[tuple[int, int]]) -> None:
    """Blocks lie in slabs, apart; what is given back is taken again; empty slabs go."""
    slabs = Slabs(1 << 40)
    pool, blocks = Pool(slabs.alloc, slabs.free), dict[int, PoolBlock]()
    for nbytes, slot in steps:
        if slot in blocks and nbytes % 2:
            del blocks[slot]
        else:
            blocks[slot] = pool.take(nbytes)
        spans = sorted((block.address, block.address + block.nbytes) for block in blocks.values())
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        for first, stop in spans:
            assert first % 256 == 0
            assert any(at <= first and stop <= at + size for at, size in slabs.out.items())
        assert pool.nbytes == sum(slabs.out.values())
    del blocks
    assert pool.unused_nbytes == pool.nbytes
    pool.trim()
    assert not slabs.out


def test_pools_reuse() -> None:
    """A pass that is repeated takes no more of the device."""
    slabs = Slabs(1 << 40)
    pool = Pool(slabs.alloc, slabs.free)
    for _ in range(3):
        first, second = pool.take(30 << 20), pool.take(1000)
        third = pool.take(5 << 20)
        del first, second, third
    assert len(slabs.out) == 2


def test_a_pool_that_is_full() -> None:
    """It takes no whole slab where there is none."""
    slabs = Slabs(1 << 20)
    pool = Pool(slabs.alloc, slabs.free)
    block = pool.take(700_000)
    with pytest.raises(MemoryError):
        pool.take(700_000)
    block.free()
    assert block.nbytes == 0
    block.free()
    pool.take(700_000)


def test_pools_that_make_room_for_each_other() -> None:
    """Two threads find a device full, one in each of its pools: neither waits for the other."""

    class Full(Ram):
        """It has room once it is trimmed, for which each thread gives the other time to come."""

        meet = threading.Barrier(2)

        def alloc(self, nbytes: int) -> int:
            with suppress(threading.BrokenBarrierError):
                self.meet.wait(0.2)
            self.trim()
            return super().alloc(nbytes)

    device = Full()
    threads = [
        threading.Thread(target=pool.take, args=(1000,), daemon=True)
        for pool in (device.persistent, device.scratch)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
