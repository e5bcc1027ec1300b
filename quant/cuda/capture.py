"""Captures the kernels that a function launches as CUDA graphs, and replays them. The host works
between two graphs, where the function cuts, and beside them.

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
from localrt.quant.cuda.stream import Beside, Between, Cut
from localrt.quant.ops.protocol import Check

_MOST_NBYTES = 32 << 20  # upper bound of the driver's memory for graphs recorded together


class Capture:
    """Captures one GPU's graphs. They run one at a time and keep no results in scratch memory, so
    they share a stream and that memory.
    """

    def __init__(self, device: Cuda) -> None:
        self.device, self.stream = device, device.new_stream(self)
        self.pool = device.new_pool()
        self._graphs: WeakSet[Graph] = WeakSet()
        self._executable_nbytes = self._recorded = 0

    def end(self) -> Graph:
        """Return the graph recorded since the device's ``begin_graph``."""
        graph = self.device.end_graph()
        self._graphs.add(graph)
        self._recorded += 1
        return graph

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the GPU memory that the driver allocates for graphs recorded in this context."""
        (free, _), taken = self.device.memory(), self.device.allocated_nbytes
        yield
        (now, _), ours = self.device.memory(), self.device.allocated_nbytes - taken
        # The rest was allocated by another process.
        self._executable_nbytes += min(max(0, free - now - ours), _MOST_NBYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of the graphs: their scratch, and the driver's memory for each."""
        if not self._graphs:  # the memory of earlier graphs has been freed
            self.pool.trim()
        mean = self._executable_nbytes // max(1, self._recorded)
        return self.pool.nbytes + len(self._graphs) * mean


class Replay(Protocol):
    """Starts the recorded graphs."""

    def __call__(self, check: Check | None = None) -> None: ...


def record(
    body: Callable[[Cut], None],
    capture: Capture,
    beside: Beside | None = None,
    launched: Callable[[], Between] | None = None,
) -> Replay:
    """Record the kernels that ``body`` starts, as one graph, or as several where it cuts; return a
    function that replays them.

    ``body`` leaves the host's work beside a graph in ``beside``. ``launched`` is called at the end
    of each graph, for what to call in a replay when the graph has been launched. Other threads may
    allocate, copy and pin meanwhile: only this thread's calls are recorded.
    """
    beside = {} if beside is None else beside
    with capture.measured():
        try:
            return _record(body, capture, beside, launched)
        except MemoryBudgetError:
            capture.device.trim()  # waits for the GPU, which is not allowed while recording
            return _record(body, capture, beside, launched)


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


def _record(
    body: Callable[[Cut], None],
    capture: Capture,
    beside: Beside,
    launched: Callable[[], Between] | None,
) -> Replay:
    steps: list[Between] = []
    device = capture.device

    def end() -> None:
        replay = capture.end().replay
        works = [make(layers) for make, layers in beside.items()]
        beside.clear()
        steps.extend(work.begin for work in works)
        steps.append(partial(_ignore_check, replay))
        if launched is not None:
            steps.append(launched())
        steps.extend(works)

    def cut(between: Between) -> None:
        end()
        steps.append(between)
        device.begin_graph()

    with device.record_on(capture.stream, capture.pool), _no_garbage():
        device.begin_graph()
        try:
            body(cut)
        except BaseException:
            with suppress(LocalrtError):  # the recording is abandoned anyway
                device.end_graph()
            raise
        end()

    def replay(check: Check | None = None) -> None:
        for step in steps:
            step(check)

    return replay
