"""Turns of several batches: one pass at a time, and what somebody waits for first."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress

import pytest

from localrt.engine.batch import device_turns as module
from localrt.engine.batch.device_turns import PassTurns
from tests.waits import wait_for

LATER = time.monotonic() + 1e5


class Batch:
    """Asks for turns in a thread of its own, and holds each until it is let go."""

    def __init__(self, turns: PassTurns, log: list[str], name: str, due: float) -> None:
        self.turns, self.log, self.name, self.due = turns, log, name, due
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        with self.turns.turn(self.name, self.due):
            self.log.append(self.name)
            assert self.go.acquire(timeout=60)


def waiting(turns: PassTurns) -> int:
    return len(turns._requests)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens by the clock."""
    monkeypatch.setattr(module, "_BACKGROUND_WAIT_S", 1e6)


def test_urgent_first() -> None:
    turns, log = PassTurns(), list[str]()
    first = Batch(turns, log, "first", math.inf)
    wait_for(lambda: log == ["first"])
    others = []
    for name, due in (("work", math.inf), ("chat", LATER + 1), ("completion", LATER)):
        others.append(Batch(turns, log, name, due))
        wait_for(lambda: waiting(turns) == len(others))
    for batch in (first, others[2]):
        batch.go.release()
        batch.thread.join(60)
    assert log == ["first", "completion"]  # it may go on: the others wait
    assert waiting(turns) == 2
    turns.leave("completion")
    wait_for(lambda: log[-1] == "chat")
    others[1].go.release()
    others[1].thread.join(60)
    assert waiting(turns) == 1
    turns.leave("chat")
    wait_for(lambda: log[-1] == "work")
    others[0].go.release()
    others[0].thread.join(60)


def test_background_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, log = PassTurns(), list[str]()
    with turns.turn("chat", LATER) as count:
        assert count == 0
        work = Batch(turns, log, "work", math.inf)
        wait_for(lambda: waiting(turns) == 1)
        monkeypatch.setattr(module, "_BACKGROUND_WAIT_S", 0.0)
        patient = Batch(turns, log, "patient", math.inf)
        wait_for(lambda: waiting(turns) == 2)
    wait_for(lambda: log == ["patient"])  # between two passes of the chat, soon enough
    patient.go.release()
    patient.thread.join(60)
    assert log == ["patient"]
    turns.leave("chat")
    wait_for(lambda: log == ["patient", "work"])
    work.go.release()
    work.thread.join(60)


def test_background_waits_for_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its patience ends before."""
    monkeypatch.setattr(module, "_BACKGROUND_WAIT_S", 0.0)
    turns, log = PassTurns(), list[str]()
    due = time.monotonic() + 0.3
    with turns.turn("first", LATER):
        completion = Batch(turns, log, "completion", due)
        wait_for(lambda: waiting(turns) == 1)
        work = Batch(turns, log, "work", math.inf)
        wait_for(lambda: waiting(turns) == 2)
    turns.leave("first")
    for batch in (completion, work):
        batch.go.release()
    completion.thread.join(60)
    turns.leave("completion")
    work.thread.join(60)
    assert log == ["completion", "work"]


def test_failed_pass() -> None:
    turns = PassTurns()
    with suppress(ZeroDivisionError), turns.turn("a", LATER):
        raise ZeroDivisionError
    with turns.turn("b", LATER - 1) as count:
        assert count == 1
    turns.leave("a")
    turns.leave("b")
    with turns.turn("c", math.inf) as count:
        assert count == 0


def test_a_late_token_does_not_wait() -> None:
    """Not even for a batch whose own is later still, and comes back at once."""
    turns = PassTurns()
    with turns.turn("completion", -2.0):
        pass
    with turns.turn("chat", -1.0) as count:
        assert count == 1
