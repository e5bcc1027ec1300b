"""Shared by the checks of ``scripts/gpu_check``: results, time and memory on a CUDA GPU.

Kernels are timed as decode runs them: many launches in one recorded CUDA graph, over inputs that
together exceed the L2 cache. Ours run on our stream, torch's on torch's. Without a GPU, each launch
runs once as a dry run.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from localrt.quant.cuda.capture import Capture, record
from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.stream import Cut
from localrt.quant.cuda.tensor import UINT8, zeros

RUNS = 5
_COPIED = 1 << 30
Values = dict[str, Any]
Check = tuple[str, Callable[[], Values]]
"""A name, and a function returning its values, with ``ok`` if it can fail."""


@dataclass
class Result:
    """One check: whether it is ``ok``, and the values that it measured."""

    name: str
    ok: bool
    seconds: float = 0.0
    values: Values = field(default_factory=dict)

    def line(self) -> str:
        """A line of text for people."""
        numbers = "  ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"[:200]
            for k, v in self.values.items()
            if k != "traceback"
        )
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name}: {numbers}"


def results_of(phase: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Result]:
    """Run the checks of a phase one by one. One that raises has failed; others still run."""
    try:
        for name, check in checks():
            yield result_of(name, check)
    except Exception as error:  # noqa: BLE001  any error is a result
        yield _failed(phase, error)


def result_of(name: str, check: Callable[[], Values]) -> Result:
    """The result of one check."""
    try:
        values = check()
        return Result(name, bool(values.pop("ok", True)), values=values)
    except Exception as error:  # noqa: BLE001
        return _failed(name, error)


def _failed(name: str, error: Exception) -> Result:
    traceback.print_exc()
    values = {"error": f"{type(error).__name__}: {error}"[:500]}
    return Result(name, False, values={**values, "traceback": traceback.format_exc()[-4000:]})


# -- time ------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any]) -> float:
    """Seconds of ``work``, including device work: torch waits for all streams."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def median_seconds(work: Callable[[], Any], device: str) -> float:
    """Median of runs on a GPU; one run elsewhere."""
    runs = RUNS if device.startswith("cuda") else 1
    return statistics.median(timed(work) for _ in range(runs))


def launch_seconds(
    launches: Sequence[Callable[[], Any]], device: str, *, by_torch: bool = False
) -> float:
    """Median seconds of one of our or torch's ``launches``, run one after another in a graph."""
    gpu = device_of(device)
    if not gpu.is_gpu:
        return timed(launches[0])

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
    """The capture of a GPU, shared by all checks, since a stream is never freed."""
    return Capture(gpu)


def copies_beyond_cache(nbytes: int, device: str) -> int:
    """How many inputs of ``nbytes`` are several times as large as the L2 cache."""
    gpu = device_of(device)
    if not gpu.is_gpu:
        return 1
    return max(4, -(-max(8 * int(gpu.cache_nbytes), 512 << 20) // nbytes))


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a device copy (reads plus writes): the ceiling."""
    gpu = device_of(device)
    size = _COPIED if gpu.is_gpu else _COPIED >> 6
    a, b = (zeros(size, dtype=UINT8, device=gpu) for _ in range(2))
    seconds = launch_seconds([partial(b.put, a)] * 4, device)
    del a, b
    gpu.trim()  # other checks need the memory
    return 2 * size / seconds


# -- memory ----------------------------------------------------------------------------------------


def free_memory(device: str = "cuda") -> int:
    """Free bytes, after this process has released its unused memory."""
    gc.collect()
    torch.cuda.empty_cache()
    gpu = device_of(device)
    gpu.trim()
    return int(gpu.memory()[0])


def watch(gpu: Any, free_before: int) -> Callable[[], int]:
    """Watch a ``Cuda`` until the returned function is called. It returns the peak memory of this
    process, relative to ``free_before``.

    Our own memory counts at its peak, the rest (kernels, graphs, cuBLAS) as of that call.
    """
    alloc, before = gpu._alloc, gpu.allocated_nbytes
    most = before

    def noted(nbytes: int) -> int:
        nonlocal most
        address: int = alloc(nbytes)
        most = max(most, gpu.allocated_nbytes)
        return address

    def peak() -> int:
        del gpu._alloc  # unpatch the method
        beside = free_before - gpu.memory()[0] - (gpu.allocated_nbytes - before)
        return int(most - before + max(0, beside))

    gpu._alloc = noted
    return peak
