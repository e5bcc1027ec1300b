"""Work in a pass's gaps: only there, only as long as the pass, and never the pass's problem."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from localrt.common.errors import CancelledError
from localrt.engine.speculation import GapWork
from tests.waits import wait_for


def drafting() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "localrt-draft"]


def nothing() -> None:
    pass


class Layers:
    """Work of many short layers, which are counted."""

    def __init__(self, useful: Callable[[Any], bool] = lambda true: False) -> None:
        self.done = 0
        self.ended = ""
        self._useful = useful

    def __call__(self, check: Callable[[], None], outcome: Callable[[], Any]) -> None:
        try:
            more = 3
            while more:
                check()
                true = outcome()
                if true is not None and not self._useful(true):
                    raise CancelledError("of no use")
                more -= true is not None
                self.done += 1
            self.ended = "finished"
        except CancelledError as error:
            self.ended = str(error)
            raise


def test_gaps_alone() -> None:
    layers = Layers()
    with GapWork(nothing, layers) as check:
        time.sleep(0.01)
        assert layers.done == 0  # the pass computes
        with check.waiting():
            wait_for(lambda: layers.done > 3)
        before = layers.done
        time.sleep(0.025)
        assert layers.done <= before + 1  # the layer that was at work has ended since
        with check.waiting():
            wait_for(lambda: layers.done > before + 1)
        check.ended([7])
    assert layers.ended == "of no use"
    assert not drafting()
    assert check.error is None
    assert 0 <= check.shared_s < check.waited_s + 5


def test_useful_work_finished() -> None:
    layers = Layers(useful=lambda true: true == [7])
    with GapWork(nothing, layers) as check:
        with check.waiting():
            wait_for(lambda: layers.done > 0)
        check.ended([7])
    assert layers.ended == "finished"
