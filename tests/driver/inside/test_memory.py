"""Memory and copies on the driver: pinned RAM, freed memory, copies that wait for events; copies
queued ahead: the right bytes however late the GPU is, and an end to what goes wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.common.files import PAGE
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock, Event
from localrt.offload.reading.queued import QueuedCopies
from localrt.offload.reading.reader import UnitReader
from localrt.offload.ring import Ring
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.tensor import INT64, UINT8, Tensor, empty, upload, zeros
from localrt.quant.formats.packed import Bytes
from tests.driver.inside.conftest import Kernels, few, hasty
from tests.driver.standin import Driver
from tests.offload.placed import PLENTY
from tests.offload.test_readers import PASSES, FakeSource, content, make_units

SLAB = 16 << 20


@pytest.fixture
def copies(gpu: Kernels) -> CudaCopies:
    return CudaCopies()


@pytest.fixture
def device(gpu: Kernels) -> Cuda:
    found: Cuda = device_of("cuda:0")
    return found


def read(memory: Tensor) -> Tensor:
    """What its stream has in it now, as a kernel would read it."""
    return empty(*memory.shape, dtype=memory.dtype, device=memory.device).put(memory)


def seen(memory: Tensor) -> set[int]:
    return set(memory.to_host().tolist())


@hasty
def test_copies_wait_for_kernels(copies: CudaCopies) -> None:
    """Which read what is overwritten; kernels wait for the copy."""
    first, second = (copies.host_buffer(64) for _ in range(2))
    first[:], second[:] = 1, 2
    memory = copies.alloc(64)
    copies.copy_in(first, memory, None)
    before = read(memory)
    after = copies.record()
    copied = copies.copy_in(second, memory, after, wait=False)
    assert not copies.ended(copied)
    copies.wait(copied)
    again = read(memory)
    assert seen(before) == {1}
    assert seen(again) == {2}
    assert copies.ended(copied)
    copies.free(memory)
    copies.close()


@hasty
def test_freed_memory_is_the_gpus_again(copies: CudaCopies, device: Cuda, driver: Driver) -> None:
    """While it is still referred to, and is being copied to."""
    before, _ = device.memory()
    memory = copies.alloc(1 << 20)
    view = memory[16:]
    assert device.memory()[0] == before - (1 << 20)
    copies.copy_in(copies.host_buffer(1 << 20), memory, None, wait=False)
    copies.free(memory)
    assert (memory.nbytes, view.nbytes) == (0, 0)
    assert device.memory()[0] == before
    assert not driver.has(view.address, 1)
    copies.close()


def test_unpinned_ram(copies: CudaCopies, driver: Driver) -> None:
    """What the system refuses is plain RAM, and nothing later fails for it."""
    driver.set(pinned=10_000)
    small, large = copies.host_buffer(4096), copies.host_buffer(40_960)
    assert copies.unpinned == 40_960
    assert driver.has(small.ctypes.data, 4096)
    memory = copies.alloc(40_960)
    for data in (small, large):
        data[:] = 7
        copies.copy_in(data, memory[: data.nbytes], None)
    assert seen(memory) == {7}
    copies.free_host(large)
    copies.free_host(small)
    assert not driver.has(small.ctypes.data, 1)
    copies.free(memory)
    copies.close()


def test_most_pinned_ram(gpu: Kernels, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is pinned, what is freed counts no longer, and no other GPU gets a context for it."""
    copies, devices, register = CudaCopies("cuda:1", most_pinned=12_000), set[int](), Cuda.register

    def noted(device: Cuda, data: Any) -> bool:
        devices.add(device.index)
        return register(device, data)

    monkeypatch.setattr(Cuda, "register", noted)
    buffers = [copies.host_buffer(nbytes) for nbytes in (4096, 40_960, 4096, 8192)]
    pinned = [driver.has(data.ctypes.data, data.nbytes) for data in buffers]
    assert pinned == [True, False, True, False]
    assert copies.unpinned == 49_152
    for data in buffers:
        copies.free_host(data)
    assert driver.registered == 0
    last = copies.host_buffer(8192)
    assert driver.has(last.ctypes.data, last.nbytes)
    assert devices == {1}
    copies.close()


def test_full_gpu(copies: CudaCopies, device: Cuda, driver: Driver) -> None:
    """Memory that is kept for later is given back first."""
    driver.set(memory=1 << 20)
    kept = zeros(700 << 10, dtype=UINT8, device=device)
    placed = CudaGpu(Clock(), CudaOps(), copies, capacity=PLENTY)
    with pytest.raises(MemoryBudgetError, match="no memory left"):
        placed.alloc(500 << 10)
    assert placed.used == 0
    del kept
    memory = copies.alloc(500 << 10)
    with pytest.raises(MemoryBudgetError, match="no memory left"):
        empty(1 << 20, dtype=UINT8, device=device)
    copies.free(memory)
    copies.close()


def test_memory_for_others(device: Cuda) -> None:
    """What is kept for later counts as free here; the last of it is never taken."""
    copies, ops = CudaCopies(), CudaOps()
    free = ops.free_memory()
    assert free == device.memory()[0]
    held = zeros(1000, device=device)
    assert device.memory()[0] == free - SLAB
    del held
    assert ops.free_memory() == free
    device.trim()
    assert device.memory()[0] == free
    copies.keep_free(free - (40 << 20))
    memory = copies.alloc(30 << 20)
    with pytest.raises(MemoryBudgetError, match="no memory left"):
        copies.alloc(11 << 20)
    copies.free(memory)
    copies.free(copies.alloc(40 << 20))
    copies.close()


@hasty
def test_uploads(device: Cuda) -> None:
    """The host may change what it has given at once, however much it gives."""
    values = np.arange(8, dtype=np.int64)
    there = upload(values, device)
    out = empty(8, dtype=INT64, device=device)
    for value in range(3):
        values[:] = value
        out.put(values)
        assert seen(out) == {value}
    assert there.to_host().tolist() == list(range(8))
    many = np.zeros(20_000, np.int64)
    copied = list[Tensor]()
    for value in range(9):  # the pinned RAM for it has room for three
        many[:] = value
        copied.append(upload(many, device))
    assert [seen(each) for each in copied] == [{value} for value in range(9)]


# -- copies queued ahead ---------------------------------------------------------------------------


class Refusing(CudaGpu):
    """``refuses`` says whether it takes no copies."""

    refuses = False

    def _queue_copy(self, source: Bytes, out: Any, after: Event | None) -> None:
        if self.refuses:
            raise LocalrtError("the GPU refuses a copy")
        super()._queue_copy(source, out, after)


@contextmanager
def copying(
    source: FakeSource,
    units: list[StoredUnit],
    *,
    from_disk: frozenset[int] = frozenset(),
    slack: int = 0,
    read_ring: int = 0,
    chunk: int = 1,
    threads: int = 2,
) -> Iterator[tuple[Refusing, UnitReader, QueuedCopies]]:
    """``read_ring`` and ``slack`` are pages of the reader's ring and of the GPU's beyond a unit."""
    largest = max(unit.nbytes for unit in units)
    gpu = Refusing(Clock(), CudaOps(), CudaCopies(), capacity=1 << 30)
    resident = {unit.name: content(unit) for n, unit in enumerate(units) if n not in from_disk}
    reader = UnitReader(
        source, Ring(largest + read_ring * PAGE, PAGE), threads=threads, stall_s=30.0
    )
    there = gpu.alloc(largest + slack * PAGE)
    ring = Ring(there.nbytes, chunk * PAGE, there)
    copies = QueuedCopies(gpu, ring, resident.get, reader)
    try:
        reader.schedule([unit for unit in units if unit.name not in resident])
        copies.schedule(units)
        yield gpu, reader, copies
    finally:
        copies.close()
        reader.close()
        gpu.free(there)
        gpu.close()


@given(
    pages=st.lists(st.integers(1, 7), min_size=1, max_size=7),
    streamed=st.frozensets(st.integers(0, 6)),
    slack=st.integers(0, 14),
    ring=st.integers(0, 9),
    chunk=st.integers(1, 9),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
    # What a pass does otherwise is here what is not wanted of it.
    passes=PASSES,
)
@few(50)
def test_any_passes(
    gpu: Kernels,
    driver: Driver,
    pages: list[int],
    streamed: frozenset[int],
    slack: int,
    ring: int,
    chunk: int,
    threads: int,
    seed: int,
    passes: list[tuple[str, frozenset[int], int | None]],
) -> None:
    driver.set(seed=seed)
    units, seen = make_units(pages), list[tuple[StoredUnit, Tensor]]()
    read_units = {unit.name for n, unit in enumerate(units) if n in streamed}
    options = {"slack": slack, "read_ring": ring, "chunk": chunk, "threads": threads}
    with copying(
        FakeSource(delay_s=0.0002, seed=seed), units, from_disk=streamed, **options
    ) as parts:
        card, reader, copies = parts
        order, places = list(units), dict[str, int]()

        def begin(order: list[StoredUnit] | None = None) -> None:
            copies.stop()
            if order is None:
                reader.rewind()
                copies.rewind()
                return
            reader.schedule([unit for unit in order if unit.name in read_units])
            copies.schedule(order)

        def use(unit: StoredUnit) -> None:
            memory = copies.acquire(unit.name)
            place = memory.address
            assert places.setdefault(unit.name, place) == place, "recordings read it there"
            seen.append((unit, read(memory)))
            copies.release(unit.name, card.record())

        for before, unwanted, ends in passes:
            if before == "rewind":
                begin()
            elif before == "schedule":
                order = order[1:] + order[:1]
                places.clear()
                begin(order)
            left_out = {unit.name for n, unit in enumerate(units) if n in unwanted}
            copies.skip(left_out)
            for number, unit in enumerate(unit for unit in order if unit.name not in left_out):
                if number == ends:
                    begin()
                    break
                use(unit)
        begin()
        for unit in [*order, *order]:
            use(unit)
        assert all((there.to_host() == content(unit)).all() for unit, there in seen)


@pytest.mark.parametrize("from_disk", [frozenset(), frozenset({0, 1})])
def test_refused_copy(gpu: Kernels, from_disk: frozenset[int]) -> None:
    """The pass that needs it fails, and a later one finds everything in order."""
    units = make_units([2, 2])
    with copying(FakeSource(), units, from_disk=from_disk) as (card, reader, copies):
        card.refuses = True
        copies.stop()
        reader.rewind()
        copies.rewind()
        with pytest.raises(LocalrtError, match="the GPU refuses a copy"):
            copies.acquire("u0")
        assert copies.failed
        card.refuses = False
        copies.stop()
        reader.rewind()
        copies.rewind()
        for unit in [*units, *units]:
            memory = copies.acquire(unit.name)
            assert (read(memory).to_host() == content(unit)).all()
            copies.release(unit.name)
