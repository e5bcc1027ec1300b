"""Times of contestants that take turns, so that whatever else runs here hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PAUSE = 0.03  # seconds: another's threads spin for a while


def by_turns(
    calls: Mapping[str, Callable[[], Any]], runs: int, *, settle: float | None = None
) -> dict[str, list[float]]:
    """Seconds of each call in every run but the first, which warms up.

    With ``settle`` a call is made for so many seconds, once at least, before it counts: threads
    wake up, each on a core of its own.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 1):
        for name, call in calls.items():
            time.sleep(_PAUSE)
            if settle is not None:
                ends = time.perf_counter() + settle
                call()
                while time.perf_counter() < ends:
                    call()
            start = time.perf_counter()
            call()
            if run:
                samples[name].append(time.perf_counter() - start)
    return samples


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Of the two in one run: memory's rate is not always the same."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
