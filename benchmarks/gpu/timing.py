"""Timing on a CUDA GPU, and results: what the sections of ``scripts/gpu_check`` share.

Kernels are timed as decode runs them: many launches in one recorded CUDA graph, over inputs that
together exceed the second-level cache. Off a GPU a launch is timed once, to try the script.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

RUNS = 5


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
    """Seconds of ``work``, device work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def launch_seconds(launches: Sequence[Callable[[], Any]], device: str) -> float:
    """Median seconds of one of ``launches``, run one after another."""
    if not device.startswith("cuda"):
        return timed(launches[0])
    for launch in launches[:2]:  # compiles
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    samples = []
    for _ in range(RUNS + 2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last) / 1e3 / len(launches))
    return statistics.median(samples[2:])


def copies_beyond_cache(nbytes: int, device: str) -> int:
    """How many inputs of ``nbytes`` are several times the second-level cache."""
    if not device.startswith("cuda"):
        return 1
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return max(4, -(-max(8 * cache, 512 << 20) // nbytes))


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a device copy, read and written counted: the ceiling."""
    size = (1 << 30) if device.startswith("cuda") else (16 << 20)
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / launch_seconds([lambda: b.copy_(a)] * 4, device)
