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
from localrt.offload.ring import Ring
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

    @property
    def nbytes(self) -> int:
        """Bytes asked for so far."""
        return sum(count for _, _, count in self.fetched)


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


def test_rewind_drops_what_was_queued() -> None:
    """What was on its way arrives; nothing of the rest of the pass is read any more."""
    units, go = make_units([2, 2, 2, 2]), threading.Event()

    def fault(unit: StoredUnit, start: int) -> None:
        if unit.name == "u2":
            go.wait(60)

    source = FakeSource(fault=fault)
    with reading(source, units, slack=2, threads=1) as reader:
        use(reader, units[0])
        use(reader, units[1])
        wait_for(lambda: source.fetched[-1][0] == "u2")
        source.fetched.clear()
        reader.rewind()
        go.set()
        for unit in units[:2]:
            use(reader, unit)
        names = [name for name, _, _ in source.fetched]
        assert names[0] == "u0"
        assert "u3" not in names
        for unit in [*units[2:], *units]:
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


def test_late_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is busy with something else, the disk is not."""
    now, go = 0.0, threading.Event()
    here, wait = threading.current_thread(), threading.Condition.wait
    monkeypatch.setattr(reader_module, "time", SimpleNamespace(perf_counter=lambda: now))
    units = make_units([2, 2])
    source = FakeSource(fault=lambda *_: (go.wait(60), None)[1])
    with reading(source, units, threads=1, stall_s=0.2) as reader:

        def late(self: threading.Condition, timeout: float | None = None) -> bool:
            nonlocal now
            if threading.current_thread() is not here or go.is_set():
                return wait(self, timeout)
            self.release()  # type: ignore[attr-defined]
            go.set()
            wait_for(lambda: reader.bytes_read >= units[0].nbytes)
            now += 0.3
            self.acquire()  # type: ignore[attr-defined]
            return True

        monkeypatch.setattr(threading.Condition, "wait", late)
        for unit in [*units, *units]:
            use(reader, unit)
        assert now == 0.3


def test_cancelled_pass_takes_nothing() -> None:
    units = make_units([2, 2])
    with reading(FakeSource(), units) as reader:

        def given_up() -> None:
            raise CancelledError("given up")

        with pytest.raises(CancelledError):
            reader.acquire(units[0].name, given_up)
        for unit in units:
            use(reader, unit)


class Slow:
    """A source that gives a piece when it is told to."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Event | None) -> None:
        """Note what is fetched, wait, and fill it."""
        self.fetched.append(unit.name)
        self.entered.release()
        assert self.gate.acquire(timeout=60)
        out[:] = 7

    def skip(self, unit: StoredUnit) -> None:
        """Nothing."""


@contextmanager
def asking(source: Slow, **options: Any) -> Iterator[Asked]:
    """A reader with one thread."""
    asked = Asked(source, **options)
    try:
        yield asked
    finally:
        asked.reader.close()


class Asked:
    """Loads of a reader by name."""

    def __init__(self, source: Slow, **options: Any) -> None:
        own = {"threads": 1, "block": 100, "stall_s": 30.0, **options}
        self.reader = DemandReader(source, **own)
        self.ended: deque[DemandLoad] = deque()

    def ask(self, name: str, nbytes: int = 400, *, urgent: bool = True) -> DemandLoad:
        unit = StoredUnit(name=name, file="f", offset=0, nbytes=nbytes, sha256="", tensors=())
        memory = np.zeros(nbytes, np.uint8)
        return self.reader.ask(unit, memory, urgent=urgent, ends=self.ended)


def test_urgent_load() -> None:
    source = Slow()
    with asking(source) as asked:
        ahead = asked.ask("a", urgent=False)
        asked.ask("b", urgent=False)
        source.entered.acquire()
        wanted = asked.ask("c")
        source.gate.release(20)
        asked.reader.wait(wanted)
        assert source.fetched[:5] == ["a", "c", "c", "c", "c"]
        asked.reader.hurry(ahead)
        asked.reader.wait(ahead)
        assert (ahead.memory == 7).all()


def test_cancelled_load_is_not_read() -> None:
    source = Slow()
    with asking(source) as asked:
        first, second = asked.ask("a", urgent=False), asked.ask("b", urgent=False)
        source.entered.acquire()
        assert asked.reader.cancel([first, second]) == [second]  # a piece of the other is read
        source.gate.release(20)
        asked.reader.wait(first)
        asked.reader.wait(asked.ask("c", 100))
        assert source.fetched == ["a", "a", "a", "a", "c"]
        assert [load.unit.name for load in asked.ended] == ["a", "c"]


def test_units_are_verified_by_those_who_read_them() -> None:
    """Once they are whole; a damaged one fails, whoever waits for it."""
    seen: list[tuple[str, bool, str]] = []

    def verify(unit: StoredUnit, data: Any) -> None:
        seen.append((unit.name, bool((data == 7).all()), threading.current_thread().name))
        if unit.name == "b":
            raise CheckpointError("unit b is damaged")

    source = Slow()
    with asking(source, threads=3, verify=verify) as asked:
        source.gate.release(20)
        loads = [asked.ask(name) for name in "abc"]
        asked.reader.wait(loads[0])
        with pytest.raises(CheckpointError, match="b is damaged"):
            asked.reader.wait(loads[1])
        asked.reader.wait(loads[2])
    assert sorted((name, whole) for name, whole, _ in seen) == [(name, True) for name in "abc"]
    assert all(name.startswith("localrt-experts") for *_, name in seen)
