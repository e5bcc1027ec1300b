"""Interleaves the runs of contestants, so that other load affects all alike; medians of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

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


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, and the quartiles below and above it."""
    low, median, high = np.percentile(samples, (25, 50, 75)).tolist()
    return {"median": median, "low": low, "high": high}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio in each turn, since the memory's rate varies between turns."""
    return [a / b for a, b in zip(over, under, strict=True)]
