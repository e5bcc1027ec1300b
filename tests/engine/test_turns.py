"""Turns of several batches: one pass at a time, and what somebody waits for first."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from localrt.engine.batch import turns as module
from localrt.engine.batch.turns import PassTurns
from tests.waits import wait_for


class Batch:
    """Asks for turns in a thread of its own, and holds each until it is let go."""

    def __init__(self, turns: PassTurns, log: list[str], name: str, *, urgent: bool) -> None:
        self.turns, self.log, self.name, self.urgent = turns, log, name, urgent
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        with self.turns.turn(self.name, urgent=self.urgent):
            self.log.append(self.name)
            assert self.go.acquire(timeout=60)


def waiting(turns: PassTurns) -> int:
    return len(turns._waiting)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens by the clock."""
    monkeypatch.setattr(module, "_PATIENCE_S", 1e6)


def test_urgent_first() -> None:
    turns, log = PassTurns(), list[str]()
    first = Batch(turns, log, "first", urgent=False)
    wait_for(lambda: log == ["first"])
    others = []
    for name, urgent in (("work", False), ("chat", True), ("completion", True)):
        others.append(Batch(turns, log, name, urgent=urgent))
        wait_for(lambda: waiting(turns) == len(others))
    for batch in (first, others[1], others[2]):
        batch.go.release()
        batch.thread.join(60)
    assert log == ["first", "chat", "completion"]  # they may go on: background work waits
    turns.rest("chat")
    assert waiting(turns) == 1
    turns.rest("completion")
    wait_for(lambda: log[-1] == "work")
    others[0].go.release()
    others[0].thread.join(60)


def test_background_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, log = PassTurns(), list[str]()
    with turns.turn("chat", urgent=True):
        work = Batch(turns, log, "work", urgent=False)
        wait_for(lambda: waiting(turns) == 1)
    assert log == []
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    turns.rest("other")  # wakes it
    wait_for(lambda: log == ["work"])
    work.go.release()
    work.thread.join(60)


def test_failed_pass() -> None:
    turns = PassTurns()
    with suppress(ZeroDivisionError), turns.turn("a", urgent=True):
        raise ZeroDivisionError
    with turns.turn("b", urgent=True):
        pass
    turns.rest("a")
    turns.rest("b")
    with turns.turn("c", urgent=False):
        pass
