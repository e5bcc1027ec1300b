"""Reading ahead and on demand: the right bytes in order, and an end to what goes wrong."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CancelledError, CheckpointError
from localrt.common.files import PAGE
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Event
from localrt.offload.reading import reader as reader_module
from localrt.offload.reading.reader import DemandLoad, DemandReader, UnitReader
from localrt.offload.ring import Lease, Ring, fixed_places
from localrt.quant.formats.packed import Bytes
from tests.waits import wait_for

Fault = Callable[[StoredUnit, int], None]


def make_units(pages: Sequence[int]) -> list[StoredUnit]:
    """Units u0, u1, ... of so many pages, one after another in one file."""
    units, offset = [], 0
    for number, count in enumerate(pages):
        units.append(StoredUnit(f"u{number}", "file.safetensors", offset, count * PAGE, "", ()))
        offset += count * PAGE
    return units


def content(unit: StoredUnit, start: int = 0, stop: int | None = None) -> Bytes:
    """The bytes of a unit: other ones in every unit and place."""
    stop = unit.nbytes if stop is None else stop
    return (np.arange(unit.offset + start, unit.offset + stop, dtype=np.uint64) // 8 % 251).astype(
        np.uint8
    )


class FakeSource:
    """``fault`` is called before each fetch, and may raise, wait or sleep."""

    def __init__(self, *, delay_s: float = 0.0, seed: int = 0, fault: Fault | None = None) -> None:
        self.fetched: list[tuple[str, int, int]] = []
        self.fault = fault
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Event | None) -> None:
        with self._lock:
            self.fetched.append((unit.name, start, len(out)))
            pause = self._delay_s * self._random.random()
        if after is not None:
            after.synchronize()
        if self.fault is not None:
            self.fault(unit, start)
        if pause:
            time.sleep(pause)
        out[:] = content(unit, start, start + len(out))


@contextmanager
def reading(
    source: FakeSource,
    units: list[StoredUnit],
    *,
    slack: int = 1,
    chunk: int = 1,
    threads: int = 2,
    stall_s: float = 30.0,
) -> Iterator[UnitReader]:
    largest = max(unit.nbytes for unit in units)
    ring = Ring(largest + slack * PAGE, chunk * PAGE)
    reader = UnitReader(source, ring, threads=threads, stall_s=stall_s)
    try:
        reader.schedule(units)
        yield reader
    finally:
        reader.close()


def use(reader: UnitReader, unit: StoredUnit) -> None:
    """Acquire, compare, give back."""
    data = reader.acquire(unit.name)
    assert (data == content(unit)).all(), unit.name
    reader.release(unit.name)


def reader_threads() -> list[threading.Thread]:
    others = ("localrt-kv-keeper", "localrt-live", "localrt-serve")  # of models of other tests
    found = [thread for thread in threading.enumerate() if thread.name.startswith("localrt-")]
    return [thread for thread in found if not thread.name.startswith(others)]


# What happens before a pass, what is done otherwise in it, and where it is given up.
PASSES = st.lists(
    st.tuples(
        st.sampled_from(["", "", "rewind", "schedule"]),
        st.frozensets(st.integers(0, 6), max_size=4),
        st.one_of(st.none(), st.none(), st.integers(0, 6)),
    ),
    min_size=1,
    max_size=5,
)


# -- what is read ----------------------------------------------------------------------------------


@given(
    pages=st.lists(st.integers(1, 7), min_size=1, max_size=7),
    slack=st.integers(0, 14),
    chunk=st.integers(1, 4),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
    passes=PASSES,
)
def test_any_passes(
    pages: list[int],
    slack: int,
    chunk: int,
    threads: int,
    seed: int,
    passes: list[tuple[str, frozenset[int], int | None]],
) -> None:
    units = make_units(pages)
    source = FakeSource(delay_s=0.0005, seed=seed)
    options = {"slack": slack, "chunk": chunk, "threads": threads}
    with reading(source, units, **options) as reader:
        order = list(units)
        for before, unwanted, ends in passes:
            if before == "rewind":
                reader.rewind()
            elif before == "schedule":
                order = order[1:] + order[:1]
                reader.schedule(order)
            left_out = {unit.name for n, unit in enumerate(units) if n in unwanted}
            if left_out:
                reader.skip(left_out)
            for number, unit in enumerate(unit for unit in order if unit.name not in left_out):
                if number == ends:
                    reader.rewind()
                    break
                use(reader, unit)
        reader.rewind()
        for unit in [*order, *order]:
            use(reader, unit)


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CheckpointError("the file was cut short"), "the file was cut short"),
        (OSError(5, "Input/output error"), "cannot be read: .*Input/output error"),
        (RuntimeError("who knows"), "file.safetensors cannot be read: who knows"),
    ],
)
def test_failed_read(error: Exception, message: str) -> None:
    units = make_units([3, 3, 3])
    source = FakeSource()

    def fault(unit: StoredUnit, start: int) -> None:
        if unit.name == "u1" and start == PAGE:
            source.fault = None
            raise error

    source.fault = fault
    with reading(source, units) as reader:
        use(reader, units[0])
        with pytest.raises(CheckpointError, match=message) as caught:
            reader.acquire("u1")
        assert "\n" not in str(caught.value)
        reader.rewind()
        for _ in range(2):
            for unit in units:
                use(reader, unit)


def test_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit may take longer than a disk may be silent; silence is an error."""
    now, silent, go = 0.0, threading.Event(), threading.Event()

    def clock() -> float:
        return now + (next(looks) if silent.is_set() else 0.0)

    def fault(unit: StoredUnit, start: int) -> None:
        nonlocal now
        if unit.name == "u0":
            now += 0.9
        else:
            silent.set()
            go.wait(60)

    looks = itertools.count(1)  # a second each
    monkeypatch.setattr(reader_module, "time", SimpleNamespace(perf_counter=clock))
    units = make_units([8, 1])
    with reading(FakeSource(fault=fault), units, slack=0, threads=1, stall_s=1.2) as reader:
        use(reader, units[0])  # 7.2 s
        with pytest.raises(CheckpointError, match="the disk has not answered"):
            reader.acquire("u1")
        go.set()


def test_close() -> None:
    before = len(reader_threads())
    with reading(FakeSource(), make_units([2, 2]), threads=4) as reader:
        assert len(reader_threads()) == before + 4
    assert len(reader_threads()) == before
    with pytest.raises(CheckpointError, match="closed"):
        reader.acquire("u1")
    reader.close()


def test_close_while_a_read_hangs() -> None:
    before = len(reader_threads())
    awake = threading.Event()
    source = FakeSource(fault=lambda *_: (awake.wait(60), None)[1])
    with reading(source, make_units([2]), threads=2):
        wait_for(lambda: len(source.fetched) == 2)
    assert not awake.is_set(), "closing waits for no read"
    awake.set()
    wait_for(lambda: len(reader_threads()) == before)


def test_cancelled_pass_takes_nothing() -> None:
    units = make_units([2, 2])
    with reading(FakeSource(), units) as reader:

        def given_up() -> None:
            raise CancelledError("given up")

        with pytest.raises(CancelledError):
            reader.acquire(units[0].name, given_up)
        for unit in units:
            use(reader, unit)


def test_units_are_verified_by_those_who_read_them() -> None:
    """Once they are whole; a damaged one fails, whoever waits for it."""
    seen: list[tuple[str, str]] = []

    def verify(unit: StoredUnit, data: Any) -> None:
        assert (data == content(unit)).all()
        seen.append((unit.name, threading.current_thread().name))
        if unit.name == "u1":
            raise CheckpointError("unit u1 is damaged")

    units, ended = make_units([3, 3, 3]), deque[DemandLoad]()
    reader = DemandReader(FakeSource(), threads=3, block=PAGE, stall_s=30.0, verify=verify)
    memories = [np.zeros(unit.nbytes, np.uint8) for unit in units]
    loads = [
        reader.ask(unit, memory, urgent=True, ends=ended)
        for unit, memory in zip(units, memories, strict=True)
    ]
    reader.wait(loads[0])
    with pytest.raises(CheckpointError, match="u1 is damaged"):
        reader.wait(loads[1])
    reader.wait(loads[2])
    reader.close()
    assert sorted(name for name, _ in seen) == ["u0", "u1", "u2"]
    assert all(name.startswith("localrt-experts") for _, name in seen)


# -- the ring ------------------------------------------------------------------------------------


def test_fixed_places() -> None:
    """At the end of what came before, else where the oldest units are."""
    assert fixed_places([3, 3, 3, 3], 10) == [0, 3, 6, 0]
    assert fixed_places([4, 5, 3, 9], 10) == [0, 4, 0, 1]
    assert fixed_places([10, 10], 10) == [0, 0]
    assert fixed_places([], 10) == []


@given(
    units=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    slack=st.integers(0, 12),
    chunk=st.integers(1, 5),
)
def test_events(units: list[int], slack: int, chunk: int) -> None:
    """Events are those of one stream: numbers that grow."""
    ring = Ring((max(units) + slack) * PAGE, chunk * PAGE)
    used = np.zeros(ring.nbytes // PAGE)  # when each page was used last

    def pages(offset: int, nbytes: int) -> slice:
        return slice(offset // PAGE, (offset + nbytes) // PAGE)

    def take(lease: Lease) -> None:
        while (found := ring.next_chunk(lease)) is not None:
            part, event = found
            assert (event or 0) == used[pages(lease.offset + part.start, part.nbytes)].max()

    live = deque[tuple[Lease, Any]]()
    for event, size in enumerate(units, 1):
        lease = None
        while lease is None or lease.waiting:
            lease = lease or ring.lease(size * PAGE)
            if lease is not None:
                take(lease)
            if lease is None or lease.waiting:
                older, ended = live.popleft()
                ring.release(older, ended)
                used[pages(older.offset, older.nbytes)] = ended
        live.append((lease, event))
