"""Recording graphs on GPUs that are not there: torch's rules for streams, pools and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from localrt.quant.cuda.capture import Capture, record

MB = 1 << 20


@dataclass(eq=False)
class FakeStream:
    device: torch.device
    waits: list[FakeStream] = field(default_factory=list)

    def wait_stream(self, other: FakeStream) -> None:
        assert other.device == self.device, "streams of two GPUs"
        self.waits.append(other)


class FakeCuda:
    """What recording uses of ``torch.cuda``, for two GPUs. ``taken`` is what the next graph takes:
    of the pool, of the driver, and of another program.
    """

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.streams = {n: FakeStream(torch.device("cuda", n)) for n in range(2)}
        self.device = 0
        self.free, self.reserved = 1000 * MB, 100 * MB
        self.taken = (0, 0, 0)
        self.graphs: dict[Any, int] = {}  # that use each pool; 0: it has ended
        self.recording: list[FakeGraph] = []
        self.replayed: list[FakeGraph] = []
        self.emptied = 0
        self._pools = 0

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(device)

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self)

    def graph_pool_handle(self) -> object:
        self._pools += 1
        return (0, self._pools)

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device.index is not None
        return self.streams[device.index]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """The stream's device is the current one too, as torch has it."""
        index, device = stream.device.index, self.device
        assert index is not None
        before, self.streams[index], self.device = self.streams[index], stream, index
        try:
            yield
        finally:
            self.streams[index], self.device = before, device

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 2000 * MB

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def empty_cache(self) -> None:
        self.emptied += 1


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.pool: Any = None
        self.stream: FakeStream | None = None

    def capture_begin(self, pool: object, *, capture_error_mode: str) -> None:
        cuda = self._cuda
        assert capture_error_mode == "thread_local"
        assert not cuda.recording
        assert cuda.graphs.get(pool) != 0, "a pool that has ended"
        cuda.graphs[pool] = cuda.graphs.get(pool, 0) + 1
        self.pool, self.stream = pool, cuda.streams[cuda.device]
        cuda.recording.append(self)

    def capture_end(self) -> None:
        assert self._cuda.recording.pop() is self
        pool, driver, others = self._cuda.taken
        self._cuda.free -= pool + driver + others
        self._cuda.reserved += pool

    def replay(self) -> None:
        self._cuda.replayed.append(self)

    def __del__(self) -> None:
        if self.pool is not None:
            self._cuda.graphs[self.pool] -= 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    for name in dir(FakeCuda):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


def on(index: int) -> Capture:
    return Capture(torch.device("cuda", index))


def nothing(cut: object) -> None:
    """Records no kernel."""


def graph_of(cuda: FakeCuda, replay: Callable[[], None]) -> FakeGraph:
    """The one that it starts."""
    replay()
    (graph,) = cuda.replayed
    cuda.replayed.clear()
    return graph


def test_two_gpus(cuda: FakeCuda) -> None:
    """Each records on a stream of its own."""
    captures, replays = [on(0), on(1)], []
    for index in (1, 0, 1):
        capture, ran = captures[index], list[tuple[int, FakeStream]]()

        def body(cut: object, ran: list[tuple[int, FakeStream]] = ran) -> None:
            ran.append((cuda.device, cuda.streams[cuda.device]))

        replays.append(record(body, capture))
        assert ran == [(index, capture.stream)]
        assert graph_of(cuda, replays[-1]).stream is capture.stream
        assert cuda.device == 0
    pools = [graph_of(cuda, replay).pool for replay in replays]
    assert pools[0] == pools[2] != pools[1]


def test_full_gpu(cuda: FakeCuda) -> None:
    """It gives back what torch keeps, once; no recording stays open."""
    runs = list[int]()

    def full(cut: object) -> None:
        runs.append(1)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        record(full, on(0))
    assert (len(runs), cuda.emptied, cuda.recording) == (2, 1, [])


def test_pools_end_with_their_graphs(cuda: FakeCuda) -> None:
    capture = on(0)
    first = record(nothing, capture)
    second = record(nothing, capture)
    del first
    third = record(nothing, capture)
    assert graph_of(cuda, second).pool == graph_of(cuda, third).pool
    del second, third
    again = record(nothing, capture)  # torch would refuse the pool of those before
    assert cuda.graphs == {(0, 1): 0, graph_of(cuda, again).pool: 1}


def test_what_graphs_take(cuda: FakeCuda) -> None:
    capture = on(0)
    assert capture.nbytes == 0
    cuda.taken = (20 * MB, 4 * MB, 0)
    first = record(nothing, capture)
    cuda.taken = (0, 0, 0)
    second = record(nothing, capture)
    assert capture.pool_nbytes == 20 * MB
    assert capture.nbytes == 24 * MB
    del second
    assert capture.nbytes == 22 * MB
    cuda.taken = (2 * MB, 0, 500 * MB)  # a game begins
    third = record(nothing, capture)
    assert capture.pool_nbytes == 22 * MB
    assert capture.nbytes < 50 * MB
    del first, third
    assert capture.nbytes == capture.pool_nbytes == 0
