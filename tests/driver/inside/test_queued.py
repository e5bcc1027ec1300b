"""Copies queued ahead: the right bytes however late the GPU is, and an end to what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CancelledError, CheckpointError, LocalrtError
from localrt.common.files import PAGE
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock, Event
from localrt.offload.reading.queued import QueuedCopies
from localrt.offload.reading.reader import UnitReader
from localrt.offload.ring import Ring
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.tensor import Tensor
from localrt.quant.formats.packed import Bytes
from tests.driver.inside.conftest import Kernels
from tests.driver.inside.gpus import few
from tests.driver.inside.test_memory import read
from tests.driver.standin import Driver
from tests.offload.test_readers import FakeSource, content, make_units


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
    read: frozenset[int] = frozenset(),
    slack: int = 0,
    read_ring: int = 0,
    chunk: int = 1,
    threads: int = 2,
) -> Iterator[tuple[Refusing, UnitReader, QueuedCopies]]:
    """``read_ring`` and ``slack`` are pages of the reader's ring and of the GPU's beyond a unit."""
    largest = max(unit.nbytes for unit in units)
    gpu = Refusing(Clock(), CudaOps(), CudaCopies(), capacity=1 << 30)
    resident = {unit.name: content(unit) for n, unit in enumerate(units) if n not in read}
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
    # What happens before a pass, what is not wanted of it, and where it is given up.
    passes=st.lists(
        st.tuples(
            st.sampled_from(["", "", "rewind", "schedule"]),
            st.frozensets(st.integers(0, 6), max_size=4),
            st.one_of(st.none(), st.none(), st.integers(0, 6)),
        ),
        min_size=1,
        max_size=5,
    ),
)
@few(100)
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
    from_disk = {unit.name for n, unit in enumerate(units) if n in streamed}
    options = {"slack": slack, "read_ring": ring, "chunk": chunk, "threads": threads}
    with copying(FakeSource(delay_s=0.0002, seed=seed), units, read=streamed, **options) as parts:
        card, reader, copies = parts
        order, places = list(units), dict[str, int]()

        def begin(order: list[StoredUnit] | None = None) -> None:
            copies.stop()
            if order is None:
                reader.rewind()
                copies.rewind()
                return
            reader.schedule([unit for unit in order if unit.name in from_disk])
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


def test_no_thread_waits_for_a_copy(gpu: Kernels, driver: Driver) -> None:
    """Nothing has been copied when the pass has launched what it can."""
    units, seen = make_units([2, 2, 2]), list[tuple[StoredUnit, Tensor]]()
    with copying(FakeSource(), units, slack=4) as (card, _, copies):
        for unit in [*units, *units]:
            seen.append((unit, read(copies.acquire(unit.name))))
            last = card.record()
            copies.release(unit.name, last)
        assert last is not None
        assert not last.query()
        assert all((there.to_host() == content(unit)).all() for unit, there in seen)


@pytest.mark.parametrize("from_disk", [frozenset(), frozenset({0, 1})])
def test_refused_copy(gpu: Kernels, from_disk: frozenset[int]) -> None:
    """The pass that needs it fails, and a later one finds everything in order."""
    units = make_units([2, 2])
    with copying(FakeSource(), units, read=from_disk) as (card, reader, copies):
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


def test_failed_read(gpu: Kernels) -> None:
    units = make_units([2, 2, 2])
    source = FakeSource()

    def fault(unit: StoredUnit, start: int) -> None:
        if unit.name == "u1":
            source.fault = None
            raise CheckpointError("the file was cut short")

    source.fault = fault
    with copying(source, units, read=frozenset({0, 1, 2})) as (card, reader, copies):
        copies.acquire("u0")
        copies.release("u0", card.record())
        with pytest.raises(CheckpointError, match="cut short"):
            copies.acquire("u1")
        copies.stop()
        reader.rewind()
        copies.rewind()
        for unit in units:
            copies.acquire(unit.name)
            copies.release(unit.name, card.record())


def test_cancelled_pass_takes_nothing(gpu: Kernels) -> None:
    units = make_units([2, 2])
    with copying(FakeSource(), units, read=frozenset({1})) as (card, _, copies):

        def given_up() -> None:
            raise CancelledError("given up")

        for unit in units:
            with pytest.raises(CancelledError):
                copies.acquire(unit.name, given_up)
            copies.acquire(unit.name)
            copies.release(unit.name, card.record())


def test_close(gpu: Kernels) -> None:
    with (
        copying(FakeSource(), make_units([2, 2])) as (_, _, copies),
        pytest.raises(ValueError, match="u7 is not"),
    ):
        copies.acquire("u7")
    with pytest.raises(CheckpointError, match="closed"):
        copies.acquire("u1")
