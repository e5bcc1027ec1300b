"""Contestants take turns, so that whatever else runs here hits all of them; medians of turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

_PAUSE = 0.03  # seconds: another's threads spin for a while
Name = TypeVar("Name")
Sample = TypeVar("Sample")


def by_turns(
    calls: Mapping[Name, Callable[[], Sample]], runs: int, *, warm_up: bool = True
) -> dict[Name, list[Sample]]:
    """What each call returns in every run, each run in another order; the first may warm up."""
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
    """The seconds of ``call``. With ``settle`` it is made for so many seconds, once at least,
    before it counts: threads wake up, each on a core of its own.
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
    """Of the two in each turn: memory's rate is not always the same."""
    return [a / b for a, b in zip(over, under, strict=True)]
