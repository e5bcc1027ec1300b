"""Capturing CUDA graphs: what a body launches, cut where the host has its part, and its replay.

It knows nothing of passes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol
from weakref import WeakSet

from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.quant.cuda.driver import Cuda, Graph
from localrt.quant.cuda.stream import Between, Cut
from localrt.quant.ops.protocol import Check

_MOST_NBYTES = 32 << 20  # that the driver takes for what is recorded at once


class Capture:
    """Where one GPU's graphs are recorded: they run one at a time and leave nothing behind, so that
    they share a stream and their scratch memory.
    """

    def __init__(self, device: Cuda) -> None:
        self.device, self.stream = device, device.new_stream(self)
        self.pool = device.new_pool()
        self._graphs: WeakSet[Graph] = WeakSet()
        self._executable_nbytes = self._recorded = 0

    def end(self) -> Graph:
        """What has been recorded since the device's ``begin_graph``."""
        graph = self.device.end_graph()
        self._graphs.add(graph)
        self._recorded += 1
        return graph

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Notes what the driver takes of the GPU's memory for what is recorded within."""
        (free, _), taken = self.device.memory(), self.device.taken_nbytes
        yield
        (now, _), ours = self.device.memory(), self.device.taken_nbytes - taken
        # The rest was allocated by another process.
        self._executable_nbytes += min(max(0, free - now - ours), _MOST_NBYTES)

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take: their scratch, and what the driver keeps of each."""
        if not self._graphs:  # what the last one has used is the GPU's again
            self.pool.trim()
        mean = self._executable_nbytes // max(1, self._recorded)
        return self.pool.nbytes + len(self._graphs) * mean


class Replay(Protocol):
    """Starts what was recorded."""

    def __call__(self, check: Check | None = None) -> None: ...


def record(body: Callable[[Cut], None], capture: Capture | None) -> Replay:
    """Record the kernels that ``body`` starts, as one graph or more where it cuts, and return what
    replays them. Where ``capture`` is None, which means no GPU, that calls ``body``.

    Other threads may allocate, copy and pin meanwhile: only this thread's calls are recorded.
    """
    if capture is None:
        return partial(_rerun, body)
    with capture.measured():
        try:
            return _record(body, capture)
        except MemoryBudgetError:
            capture.device.trim()  # which waits for the GPU, as no recording may
            return _record(body, capture)


def _rerun(body: Callable[[Cut], None], check: Check | None = None) -> None:
    def cut(between: Between) -> None:
        between(check)

    body(cut)


def _ignore_check(replay: Callable[[], None], check: Check | None) -> None:
    replay()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause garbage collection while capturing: freeing a torch tensor records an event, which
    aborts the capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _record(body: Callable[[Cut], None], capture: Capture) -> Replay:
    steps: list[Between] = []
    device = capture.device

    def end() -> None:
        steps.append(partial(_ignore_check, capture.end().replay))

    def cut(between: Between) -> None:
        end()
        steps.append(between)
        device.begin_graph()

    with device.record_on(capture.stream, capture.pool), _no_garbage():
        device.begin_graph()
        try:
            body(cut)
        except BaseException:
            with suppress(LocalrtError):  # of the recording, which is of no use any more
                device.end_graph()
            raise
        end()

    def replay(check: Check | None = None) -> None:
        for step in steps:
            step(check)

    return replay
