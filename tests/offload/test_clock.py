"""Busy is the time in which a resource had any task, however many at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.offload.device.gpu import Clock


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_busy(spans: list[tuple[int, int]]) -> None:
    hands = Hands()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", hands)
        clock = Clock(keep=100)
        open_: dict[int, float] = {}
        events = [(start, 1, n) for n, (start, _) in enumerate(spans)]
        events += [(start + length, 2, n) for n, (start, length) in enumerate(spans)]
        for at, kind, number in sorted(events):
            hands.now = float(at)
            if kind == 1:
                open_[number] = clock.begin("ssd")
            else:
                clock.end("ssd", f"task {number}", open_[number])
        hands.now = 1000.0
        covered = {at for start, length in spans for at in range(start, start + length)}
        assert clock.busy().get("ssd", 0.0) == len(covered)
        kept = {(task.name, task.start, task.end) for task in clock.tasks()}
        assert kept == {
            (f"task {n}", float(start), float(start + length))
            for n, (start, length) in enumerate(spans)
        }


def test_busy_now(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()
    monkeypatch.setattr(time, "perf_counter", hands)
    clock = Clock()
    hands.now = 5.0
    first = clock.begin("ssd")
    hands.now = 7.0
    second = clock.begin("ssd")
    cpu = clock.begin("cpu")
    hands.now = 8.0
    assert clock.busy() == {"ssd": 3.0, "cpu": 1.0}
    clock.end("ssd", "first", first)
    hands.now = 9.0
    clock.end("cpu", "mlp", cpu)
    assert clock.busy() == {"ssd": 4.0, "cpu": 2.0}
    clock.end("ssd", "second", second)
    hands.now = 20.0
    assert clock.busy() == {"ssd": 4.0, "cpu": 2.0}
    assert clock.tasks() == [], "none is kept until asked for"


def test_kept_tasks() -> None:
    clock = Clock(keep=3)

    def work(name: str) -> None:
        clock.end("gpu", name, clock.begin("gpu"))

    for number in range(5):
        work(str(number))
    assert [task.name for task in clock.tasks()] == ["2", "3", "4"]
    clock.keep(1)
    assert [task.name for task in clock.tasks()] == ["4"]
    clock.keep(0)
    work("5")
    assert clock.tasks() == []
