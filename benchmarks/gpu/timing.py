"""Timing on a CUDA GPU, and results: what the sections of ``scripts/gpu_check`` share.

Kernels are timed as decode runs them: many launches in one recorded CUDA graph, over inputs that
together exceed the second-level cache. Ours run on our stream, torch's on torch's. Off a GPU a
launch is timed once, to try the script.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from localrt.quant.cuda.capture import Capture, record
from localrt.quant.cuda.driver import Cuda, Event, device_of
from localrt.quant.cuda.stream import Cut
from localrt.quant.cuda.tensor import UINT8, zeros

RUNS = 5
_COPIED = 1 << 30


@dataclass
class Result:
    """One check: ``ok`` against its bound, and whatever numbers it found."""

    name: str
    ok: bool
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """For people."""
        numbers = "  ".join(
            f"{k} {v:.4g}" if isinstance(v, float | int) and not isinstance(v, bool) else f"{k} {v}"
            for k, v in self.values.items()
        )
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name}: {numbers}"


def guarded(name: str, check: Callable[[], list[Result]]) -> list[Result]:
    """What a check found; one failed result where it raised, so that the others still run."""
    return list(one_by_one(name, check))


def one_by_one(name: str, check: Callable[[], Iterable[Result]]) -> Iterator[Result]:
    """The same, each result as soon as it is there."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001  whatever it was, it is the result
        traceback.print_exc()
        yield Result(name, False, values={"error": f"{type(error).__name__}: {error}"[:500]})


def timed(work: Callable[[], Any]) -> float:
    """Seconds of ``work``, device work included: torch waits for the streams of all."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def launch_seconds(launches: Sequence[Callable[[], Any]], device: str) -> float:
    """Median seconds of one of our ``launches``, run one after another."""
    gpu = device_of(device)
    if not gpu.is_gpu:
        return timed(launches[0])
    for launch in launches[:2]:  # compiles
        launch()
    gpu.synchronize()

    def body(cut: Cut) -> None:
        for launch in launches:
            launch()

    return replay_seconds(record(body, _capture(gpu)), device) / len(launches)


def replay_seconds(replay: Callable[[], Any], device: str) -> float:
    """Median seconds that a GPU takes for what is recorded."""
    gpu = device_of(device)
    return _median(replay, lambda: gpu.event(timed=True), Event.ms_until)


def torch_seconds(launches: Sequence[Callable[[], Any]], device: str) -> float:
    """The same of torch's."""
    if not device.startswith("cuda"):
        return timed(launches[0])
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph, kind = torch.cuda.CUDAGraph(), torch.cuda.Event
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return _median(graph.replay, lambda: kind(enable_timing=True), kind.elapsed_time) / len(
        launches
    )


@cache
def _capture(gpu: Cuda) -> Capture:
    """Where all graphs of a GPU are recorded: a stream stays for as long as the process lives."""
    return Capture(gpu)


def _median(
    replay: Callable[[], Any], event: Callable[[], Any], elapsed_ms: Callable[[Any, Any], float]
) -> float:
    """Seconds of a replay between two events."""
    samples = []
    for _ in range(RUNS + 2):
        first, last = event(), event()
        first.record()
        replay()
        last.record()
        last.synchronize()
        samples.append(elapsed_ms(first, last) / 1e3)
    return statistics.median(samples[2:])


def copies_beyond_cache(nbytes: int, device: str) -> int:
    """How many inputs of ``nbytes`` are several times the second-level cache."""
    gpu = device_of(device)
    if not gpu.is_gpu:
        return 1
    return max(4, -(-max(8 * int(gpu.cache_nbytes), 512 << 20) // nbytes))


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a device copy, read and written counted: the ceiling."""
    gpu = device_of(device)
    size = _COPIED if gpu.is_gpu else _COPIED >> 6
    a, b = (zeros(size, dtype=UINT8, device=gpu) for _ in range(2))
    seconds = launch_seconds([partial(b.put, a)] * 4, device)
    del a, b
    gpu.trim()  # others need the memory
    return 2 * size / seconds
