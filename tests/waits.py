"""Waiting for what happens sooner or later, and how closely a pass looks while it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until it holds; it is an error when it does not in so many seconds."""
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "it did not happen"
        time.sleep(0.002)


async def wait_in_loop(
    condition: Callable[[], object], pause: Callable[[], Awaitable[object]], seconds: float = 60.0
) -> None:
    """``wait_for`` in a coroutine: ``pause`` lets others run."""
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "it did not happen"
        await pause()


def open_files() -> int:
    """How many files, or what the system counts instead, this process has open."""
    process = psutil.Process()
    return int(process.num_fds() if hasattr(process, "num_fds") else process.num_handles())


@contextmanager
def naps() -> Iterator[list[float]]:
    """The most seconds that this thread lets pass between two looks, whenever it waits."""
    found: list[float] = []
    here, wait = threading.current_thread(), threading.Condition.wait

    def noted(self: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is not None and threading.current_thread() is here:
            found.append(timeout)
        return wait(self, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Condition, "wait", noted)
        yield found
