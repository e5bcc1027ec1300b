"""The time of kernels, as decode runs them: many launches in one recorded CUDA graph, over inputs
that together exceed the L2 cache. Ours run on our stream, torch's on torch's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.graph import Capture, record
from localrt.quant.cuda.stream import Cut
from localrt.quant.cuda.tensor import UINT8, zeros

RUNS = 5


def launch_seconds(launches: Sequence[Callable[[], Any]], *, by_torch: bool = False) -> float:
    """Median seconds of one of our or torch's ``launches``, run one after another in a graph."""
    gpu: Any = device_of("cuda")

    def body(*_: Cut) -> None:
        for launch in launches:
            launch()

    for launch in launches[:2]:  # compiles
        launch()
    new_event: Callable[[], Any] = partial(gpu.event, timed=True)
    replay: Callable[[], Any]
    if by_torch:
        torch.cuda.synchronize()
        kind: Any = torch.cuda
        graph, new_event = kind.CUDAGraph(), partial(kind.Event, enable_timing=True)
        with kind.graph(graph):
            body()
        replay = graph.replay
    else:
        gpu.synchronize()
        replay = record(body, _capture(gpu))
    samples: list[float] = []
    for _ in range(RUNS + 2):
        first, last = new_event(), new_event()
        first.record()
        replay()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last) if by_torch else first.ms_until(last))
    return statistics.median(samples[2:]) / 1e3 / len(launches)


@cache
def _capture(gpu: Cuda) -> Capture:
    """The capture of a GPU, shared by all measurements, since a stream is never freed."""
    return Capture(gpu)


def copies_beyond_cache(nbytes: int) -> int:
    """How many inputs of ``nbytes`` are several times as large as the L2 cache."""
    gpu: Any = device_of("cuda")
    return max(4, -(-max(8 * int(gpu.cache_nbytes), 512 << 20) // nbytes))


def copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes per second of a device copy (reads plus writes): the ceiling."""
    gpu = device_of("cuda")
    a, b = (zeros(nbytes, dtype=UINT8, device=gpu) for _ in range(2))
    seconds = launch_seconds([partial(b.put, a)] * 4)
    del a, b
    gpu.trim()  # others need the memory
    return 2 * nbytes / seconds
