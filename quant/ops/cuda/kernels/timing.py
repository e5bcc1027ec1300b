"""Seconds that a card takes for what is launched, by its own clock.

The second-level cache is overwritten before each run: a matrix comes from memory, as in a pass. The
same writes keep the card busy while the host prepares the launch, so that its time is not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

_RUNS = 5
_WRITES = 4
_WAKING_S = 0.2
_LEAST_CACHE = 16 << 20


class Stopwatch(Protocol):
    """Times what is launched on one device."""

    def ready(self) -> bool:
        """Whether anything can be timed now: not while a pass is recorded."""

    def seconds(self, launch: Callable[[], object]) -> float:
        """Of what ``launch`` starts, which it does several times."""


class CudaStopwatch:
    """See ``Stopwatch``; by events on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._overwritten = 2 * max(cache, _LEAST_CACHE)
        self._awake = False

    def ready(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def seconds(self, launch: Callable[[], object]) -> float:
        """See ``Stopwatch``. The median of five runs; what is not compiled is compiled before.

        Raises:
            torch.OutOfMemoryError: the card has no room for the bytes that fill its cache.
        """
        launch()
        cuda: Any = torch.cuda  # not typed throughout
        filler = torch.empty(self._overwritten, dtype=torch.uint8, device=self._device)
        if not self._awake:
            self._wake(filler)
        runs = []
        for _ in range(_RUNS):
            first, last = (cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_WRITES):
                filler.zero_()
            first.record()
            launch()
            last.record()
            runs.append((first, last))
        runs[-1][1].synchronize()
        return float(statistics.median(first.elapsed_time(last) for first, last in runs) / 1e3)

    def _wake(self, filler: torch.Tensor) -> None:
        """Keep the card busy until its clocks are those of work: what is timed first would lose."""
        end = time.perf_counter() + _WAKING_S
        while time.perf_counter() < end:
            filler.zero_()
            torch.cuda.current_stream(self._device).synchronize()
        self._awake = True
