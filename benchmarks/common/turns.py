"""Interleaves the runs of contestants, so that other load affects all alike; medians of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

_PAUSE = 0.03  # seconds between contestants, whose idle threads spin for a while
Name = TypeVar("Name")
Sample = TypeVar("Sample")


def by_turns(
    calls: Mapping[Name, Callable[[], Sample]], runs: int, *, warm_up: bool = True
) -> dict[Name, list[Sample]]:
    """The results of each call in every run, in varying order; the first may warm up."""
    samples: dict[Name, list[Sample]] = {name: [] for name in calls}
    names = list(calls)
    for run in range(runs + warm_up):
        for name in names:
            sample = calls[name]()
            if run >= warm_up:
                samples[name].append(sample)
        names.append(names.pop(0))
    return samples


def timed(call: Callable[[], object], *, settle: float | None = None) -> Callable[[], float]:
    """A function that times ``call``. It first repeats the call for ``settle`` seconds, at least
    once, so that threads wake up and spread over cores.
    """

    def seconds() -> float:
        time.sleep(_PAUSE)
        if settle is not None:
            ends = time.perf_counter() + settle
            call()
            while time.perf_counter() < ends:
                call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, median, high = np.percentile(samples, (25, 50, 75)).tolist()
    return {"median": median, "quartiles": [low, high], "samples": list(samples)}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio in each turn, since the memory's rate varies between turns."""
    return [a / b for a, b in zip(over, under, strict=True)]
