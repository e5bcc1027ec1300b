"""Measures what schedules depend on: the rate of queued copies of several sizes, how soon a thread
resumes after a wait, and the cost of a launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common.record import Record
from benchmarks.gpu.timing import copy_bandwidth
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.tensor import upload

_COPIED = 160 << 20
_PIECES = (2 << 20, 8 << 20, 16 << 20, 32 << 20, 160 << 20)
_DEEP = 8  # copies queued at once
_ROW = 5120  # elements
_LAUNCHES = 500


def facts(copied: int = _COPIED, runs: int = 21) -> Iterator[tuple[str, Record]]:
    """Facts about the GPU, its link and the host; medians of ``runs``, copies of ``copied`` bytes
    at most.
    """
    yield "on the GPU", {"copied_gb_s": copy_bandwidth(6 * copied) / 1e9}
    yield "copies", _copies(copied, runs)
    yield "waits", _waits(runs)


def _copies(most: int, runs: int) -> Record:
    """GB/s of queued copies from pinned RAM, timed by GPU events."""
    copies = CudaCopies()
    source, memory = copies.host_buffer(most), copies.alloc(most)
    source[:] = 1
    found: Record = {}
    for piece in (piece for piece in _PIECES if piece <= most):

        def queued(piece: int = piece) -> float:
            for number in range(_DEEP):
                start = number * piece % most
                copies.queue(source[start : start + piece], memory[start : start + piece], None)
            ((began, ended),) = copies.end_copy()
            assert began is not None, "a GPU has events"
            assert ended is not None, "a GPU has events"
            ended.synchronize()
            return float(_DEEP * piece / began.ms_until(ended) / 1e6)

        found[f"gb_s_{piece >> 20}_mb"] = _median(queued, runs)
    copies.free_host(source)
    copies.free(memory)
    copies.close()
    return found


def _waits(runs: int) -> Record:
    """Microseconds of an empty wait (spinning or sleeping, after idle or busy cores), a row's round
    trip to the GPU, and a launch on host and GPU.
    """
    gpu: Any = device_of("cuda")
    host = NativeOps()
    data = np.ones(64 << 20, np.uint8)
    row = np.ones((1, _ROW), np.float32)

    def event(sleeps: bool, busy: bool) -> float:
        if busy:
            host.read_all(data)
        made = gpu.event(sleeps=sleeps)
        started = time.perf_counter()
        made.record()
        made.synchronize()
        return time.perf_counter() - started

    def crossing() -> float:
        started = time.perf_counter()
        upload(row, gpu).bits()
        return time.perf_counter() - started

    there = upload(row, gpu)

    def launches() -> tuple[float, float]:
        first, last = gpu.event(timed=True), gpu.event(timed=True)
        first.record()
        started = time.perf_counter()
        for _ in range(_LAUNCHES):
            there.put(row)
        seconds = time.perf_counter() - started
        last.record()
        last.synchronize()
        return seconds / _LAUNCHES, first.ms_until(last) / 1e3 / _LAUNCHES

    found = {
        f"{'sleeping' if sleeps else 'spinning'}{', cores busy' if busy else ''}": _median(
            partial(event, sleeps, busy), runs
        )
        for sleeps in (False, True)
        for busy in (False, True)
    }
    found["row there and back"] = _median(crossing, runs)
    found["launch, host"] = _median(lambda: launches()[0], runs)
    found["launch, GPU"] = _median(lambda: launches()[1], runs)
    return {f"{name}, us": 1e6 * seconds for name, seconds in found.items()}


def _median(measure: Callable[[], float], runs: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(runs))
