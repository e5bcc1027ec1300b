"""Reading what is asked for: the urgent first, and what is cancelled not at all."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Event
from localrt.offload.reading.reader import DemandLoad, DemandReader


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


class Asked:
    """A reader with one thread, and loads of it by name."""

    def __init__(self, source: Slow, **options: Any) -> None:
        self.reader = DemandReader(
            source, **{"threads": 1, "block": 100, "stall_s": 30.0, **options}
        )
        self.ended: deque[DemandLoad] = deque()

    def ask(self, name: str, nbytes: int = 400, *, urgent: bool = True) -> DemandLoad:
        unit = StoredUnit(name=name, file="f", offset=0, nbytes=nbytes, sha256="", tensors=())
        memory = np.zeros(nbytes, np.uint8)
        return self.reader.ask(unit, memory, urgent=urgent, ends=self.ended)


def test_urgent_load() -> None:
    source = Slow()
    asked = Asked(source)
    try:
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
    finally:
        asked.reader.close()


def test_cancelled_load_is_not_read() -> None:
    source = Slow()
    asked = Asked(source)
    try:
        first, second = asked.ask("a", urgent=False), asked.ask("b", urgent=False)
        source.entered.acquire()
        assert asked.reader.cancel([first, second]) == [second]  # a piece of the other is read
        source.gate.release(20)
        asked.reader.wait(first)
        asked.reader.wait(asked.ask("c", 100))
        assert source.fetched == ["a", "a", "a", "a", "c"]
        assert [load.unit.name for load in asked.ended] == ["a", "c"]
    finally:
        asked.reader.close()


def test_units_are_verified_by_those_who_read_them() -> None:
    """Once they are whole; a damaged one fails, whoever waits for it."""
    seen: list[tuple[str, bool, str]] = []

    def verify(unit: StoredUnit, data: Any) -> None:
        seen.append((unit.name, bool((data == 7).all()), threading.current_thread().name))
        if unit.name == "b":
            raise CheckpointError("unit b is damaged")

    source = Slow()
    asked = Asked(source, threads=3, verify=verify)
    try:
        source.gate.release(20)
        loads = [asked.ask(name) for name in "abc"]
        asked.reader.wait(loads[0])
        with pytest.raises(CheckpointError, match="b is damaged"):
            asked.reader.wait(loads[1])
        asked.reader.wait(loads[2])
    finally:
        asked.reader.close()
    assert sorted((name, whole) for name, whole, _ in seen) == [(name, True) for name in "abc"]
    assert all(name.startswith("localrt-experts") for *_, name in seen)
