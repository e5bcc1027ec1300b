"""Capturing CUDA graphs: what a body launches, cut where the host has its part, and its replay.

It knows torch's streams, graphs and memory pools, and nothing of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import torch

from localrt.quant.cuda.stream import Between, Cut

_MOST_NBYTES = 32 << 20  # that the driver takes for what is recorded at once

Check: TypeAlias = Callable[[], None]


class Capture:
    """Where one GPU's graphs are recorded: they run one at a time and leave nothing behind, so that
    they share a stream and their scratch memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda  # not typed throughout
        self.device, self.stream = device, self._cuda.Stream(device)
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()
        self._pool_nbytes = self._executable_nbytes = self._recorded = 0

    def begin(self) -> Any:
        """A graph that records the current stream until ``capture_end``."""
        if not self._graphs:  # torch ends a pool with its last graph
            self._pool, self._pool_nbytes = self._cuda.graph_pool_handle(), 0
        graph = self._cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        self._graphs.add(graph)
        self._recorded += 1
        return graph

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Notes what is recorded within takes of the GPU's memory."""
        free, reserved = self._memory()
        yield
        now_free, now_reserved = self._memory()
        pool = max(0, now_reserved - reserved)
        self._pool_nbytes += pool
        # More is another program's.
        self._executable_nbytes += min(max(0, free - now_free - pool), _MOST_NBYTES)

    def _memory(self) -> tuple[int, int]:
        free, _ = self._cuda.mem_get_info(self.device)
        return free, self._cuda.memory_reserved(self.device)

    @property
    def pool_nbytes(self) -> int:
        """The graphs' scratch memory, which torch keeps for them."""
        return self._pool_nbytes if self._graphs else 0

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take: their scratch, and what the driver keeps of each."""
        mean = self._executable_nbytes // max(1, self._recorded)
        return self.pool_nbytes + len(self._graphs) * mean


class Replay(Protocol):
    """Starts what was recorded."""

    def __call__(self, check: Check | None = None) -> None: ...


def record(body: Callable[[Cut], None], capture: Capture | None) -> Replay:
    """Record the kernels that ``body`` starts, as one graph or more where it cuts, and return what
    replays them. Where ``capture`` is None, which means no GPU, that calls ``body``.

    Other threads may allocate, copy and pin meanwhile: only this thread's calls are recorded.
    ``torch.cuda.graph`` would wait for the whole device, give back all memory that torch keeps, and
    record every GPU's kernels on a stream of the first one.
    """
    if capture is None:
        return partial(_rerun, body)
    with capture.measured():
        try:
            return _record(body, capture)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # which torch does not do by itself while it records
            return _record(body, capture)


def _rerun(body: Callable[[Cut], None], check: Check | None = None) -> None:
    def cut(between: Between) -> None:
        between(check)

    body(cut)


def _ignore_check(replay: Callable[[], None], check: Check | None) -> None:
    replay()


def _record(body: Callable[[Cut], None], capture: Capture) -> Replay:
    steps: list[Between] = []
    graph: Any = None

    def begin() -> None:
        nonlocal graph
        graph = capture.begin()

    def end() -> None:
        graph.capture_end()
        steps.append(partial(_ignore_check, graph.replay))

    def cut(between: Between) -> None:
        end()
        steps.append(between)
        begin()

    with torch.cuda.stream(capture.stream):
        begin()
        try:
            body(cut)
        except BaseException:
            with suppress(RuntimeError):  # of the recording, which is of no use any more
                graph.capture_end()
            raise
        end()

    def replay(check: Check | None = None) -> None:
        for step in steps:
            step(check)

    return replay
