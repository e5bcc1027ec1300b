"""Copies queued ahead: the right bytes however late the GPU is, and an end to what goes wrong."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CancelledError, CheckpointError, LocalrtError
from localrt.common.files import PAGE
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Clock, Event
from localrt.offload.reading.queued import QueuedCopies
from localrt.offload.reading.reader import UnitReader
from localrt.offload.ring import Ring
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.packed import Bytes
from tests.conftest import needs_kernels
from tests.offload.fake_source import FakeSource, content, make_units
from tests.offload.gpu.fakes import FakeGpu

pytestmark = needs_kernels


class Mark:
    """An event; ``run`` has its GPU do what comes before it."""

    def __init__(self, run: Callable[[Mark], None]) -> None:
        self._run = run
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self._run(self)


class Streams(FakeGpu):
    """Its two streams do what they are given in order, and whichever comes first between them."""

    def __init__(self, seed: int) -> None:
        super().__init__(Clock(), NativeOps(threads=1), capacity=1 << 30)
        self._random = random.Random(seed)
        self.streams: dict[str, deque[Mark | Callable[[], bool]]] = {
            "copies": deque(),
            "kernels": deque(),
        }
        self._lock_streams = threading.RLock()
        self.refuses = False

    def give(self, stream: str, work: Mark | Callable[[], bool]) -> None:
        """``work`` returns False as long as it has to wait."""
        with self._lock_streams:
            self.streams[stream].append(work)

    def run(self, done: Callable[[], bool], steps: int = 1 << 30) -> None:
        with self._lock_streams:
            while steps > 0 and not done():
                names = [name for name, work in self.streams.items() if work]
                if not names:
                    return
                work = self.streams[name := self._random.choice(names)][0]
                if isinstance(work, Mark):
                    work.happened = True
                elif not work():
                    other = next(iter({*names} - {name}), None)
                    assert other is not None, "the streams wait for each other"
                    steps -= 1
                    continue
                self.streams[name].popleft()
                steps -= 1

    def some(self) -> None:
        """Do a part of it."""
        self.run(lambda: False, self._random.randrange(6))

    def _queue_copy(self, source: Bytes, out: Any, after: Event | None) -> None:
        if self.refuses:
            raise LocalrtError("the GPU refuses a copy")

        def copy() -> bool:
            if after is None or after.query():
                out[:] = source
                return True
            return False

        self.give("copies", copy)

    def _marked(self, stream: str) -> Mark:
        mark = Mark(lambda mark: self.run(lambda: mark.happened))
        self.give(stream, mark)
        return mark

    def end_copy(self, name: str) -> Event | None:
        return self._marked("copies")

    def record(self) -> Event | None:
        return self._marked("kernels")

    def wait(self, event: Event | None) -> None:
        if event is not None:
            self.give("kernels", event.query)

    def settle_copies(self) -> None:
        self._marked("copies").synchronize()


@contextmanager
def copying(
    source: FakeSource,
    units: list[StoredUnit],
    *,
    read: frozenset[int] = frozenset(),
    slack: int = 0,
    ring: int = 0,
    chunk: int = 1,
    threads: int = 2,
    seed: int = 0,
) -> Iterator[tuple[Streams, UnitReader, QueuedCopies]]:
    """``ring`` and ``slack`` are pages of the reader's ring and of the GPU's beyond a unit."""
    largest = max(unit.nbytes for unit in units)
    gpu = Streams(seed)
    resident = {unit.name: content(unit) for n, unit in enumerate(units) if n not in read}
    reader = UnitReader(source, Ring(largest + ring * PAGE, PAGE), threads=threads, stall_s=30.0)
    copies = QueuedCopies(gpu, Ring(largest + slack * PAGE, chunk * PAGE), resident.get, reader)
    try:
        reader.schedule([unit for unit in units if unit.name not in resident])
        copies.schedule(units)
        yield gpu, reader, copies
    finally:
        copies.close()
        reader.close()


@given(
    pages=st.lists(st.integers(1, 7), min_size=1, max_size=7),
    read=st.frozensets(st.integers(0, 6)),
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
def test_any_passes(
    pages: list[int],
    read: frozenset[int],
    slack: int,
    ring: int,
    chunk: int,
    threads: int,
    seed: int,
    passes: list[tuple[str, frozenset[int], int | None]],
) -> None:
    units, wrong = make_units(pages), list[str]()
    from_disk = {unit.name for n, unit in enumerate(units) if n in read}
    options = {"slack": slack, "ring": ring, "chunk": chunk, "threads": threads, "seed": seed}
    with copying(FakeSource(delay_s=0.0002, seed=seed), units, read=read, **options) as parts:
        gpu, reader, copies = parts
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
            place = memory.ctypes.data
            assert places.setdefault(unit.name, place) == place, "recordings read it there"

            def kernel() -> bool:
                if not (memory == content(unit)).all():
                    wrong.append(unit.name)
                return True

            gpu.give("kernels", kernel)
            gpu.some()
            copies.release(unit.name, gpu.record())
            gpu.some()

        for before, unwanted, ends in passes:
            if before == "rewind":
                begin()
            elif before == "schedule":
                order = order[1:] + order[:1]
                gpu.run(lambda: False)
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
        gpu.run(lambda: False)
        assert not wrong


def test_no_thread_waits_for_a_copy() -> None:
    """Nothing has been copied when the pass has launched what it can."""
    units = make_units([2, 2, 2])
    with copying(FakeSource(), units, slack=4) as (gpu, _, copies):
        gpu.some = lambda: None  # type: ignore[method-assign]
        for unit in [*units, *units]:
            copies.acquire(unit.name)
            copies.release(unit.name, gpu.record())
        assert len(gpu.streams["kernels"]) == 2 * 6
        gpu.run(lambda: False)


@pytest.mark.parametrize("read", [frozenset(), frozenset({0, 1})])
def test_refused_copy(read: frozenset[int]) -> None:
    """The pass that needs it fails, and a later one finds everything in order."""
    units = make_units([2, 2])
    with copying(FakeSource(), units, read=read) as (gpu, reader, copies):
        gpu.refuses = True
        copies.stop()
        reader.rewind()
        copies.rewind()
        with pytest.raises(LocalrtError, match="the GPU refuses a copy"):
            copies.acquire("u0")
        assert copies.failed
        gpu.refuses = False
        copies.stop()
        reader.rewind()
        copies.rewind()
        for unit in [*units, *units]:
            memory = copies.acquire(unit.name)
            gpu.run(lambda: False)
            assert (memory == content(unit)).all()
            copies.release(unit.name)


def test_failed_read() -> None:
    units = make_units([2, 2, 2])
    source = FakeSource()

    def fault(unit: StoredUnit, start: int) -> None:
        if unit.name == "u1":
            source.fault = None
            raise CheckpointError("the file was cut short")

    source.fault = fault
    with copying(source, units, read=frozenset({0, 1, 2})) as (gpu, reader, copies):
        copies.acquire("u0")
        copies.release("u0", gpu.record())
        with pytest.raises(CheckpointError, match="cut short"):
            copies.acquire("u1")
        copies.stop()
        reader.rewind()
        copies.rewind()
        for unit in units:
            copies.acquire(unit.name)
            copies.release(unit.name, gpu.record())


def test_cancelled_pass_takes_nothing() -> None:
    units = make_units([2, 2])
    with copying(FakeSource(), units, read=frozenset({1})) as (gpu, _, copies):

        def given_up() -> None:
            raise CancelledError("given up")

        for unit in units:
            with pytest.raises(CancelledError):
                copies.acquire(unit.name, given_up)
            copies.acquire(unit.name)
            copies.release(unit.name, gpu.record())


def test_close() -> None:
    with (
        copying(FakeSource(), make_units([2, 2])) as (_, _, copies),
        pytest.raises(ValueError, match="u7 is not"),
    ):
        copies.acquire("u7")
    with pytest.raises(CheckpointError, match="closed"):
        copies.acquire("u1")
