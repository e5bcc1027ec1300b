"""Counts of a server, in Prometheus' text format.

It knows numbers and names, not what they count.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

__all__ = ["Metrics", "render"]

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters and histograms. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, float]] = {}
        self._times: dict[str, list[float]] = {}  # counts of the buckets, the sum, the count

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        """Add to a counter."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            series = self._counts.setdefault(name, {})
            series[key] = series.get(key, 0) + by

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            row = self._times.setdefault(name, [0.0] * (len(_BUCKETS) + 2))
            place = bisect_left(_BUCKETS, seconds)
            if place < len(_BUCKETS):
                row[place] += 1
            row[-2] += seconds
            row[-1] += 1

    def mean(self, name: str) -> float | None:
        """The mean of a histogram's durations; None where there are none."""
        with self._lock:
            row = self._times.get(name)
            return row[-2] / row[-1] if row else None

    def lines(self, help_texts: Mapping[str, str]) -> Iterator[str]:
        """All of them, as text; names without a help text are an error."""
        with self._lock:
            counts = {name: dict(series) for name, series in self._counts.items()}
            times = {name: list(row) for name, row in self._times.items()}
        for name, series in counts.items():
            yield from render(name, "counter", help_texts[name], list(series.items()))
        for name, row in times.items():
            yield from _histogram(name, help_texts[name], row)


def render(
    name: str, kind: str, help_text: str, series: Sequence[tuple[Labels, float]]
) -> Iterator[str]:
    """One metric with its values by label."""
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in series:
        yield f"{name}{_spelled(labels)} {_number(value)}"


def _histogram(name: str, help_text: str, row: Sequence[float]) -> Iterator[str]:
    bounds = [*(f"{bound:g}" for bound in _BUCKETS), "+Inf"]
    counts = [*accumulate(row[: len(_BUCKETS)]), row[-1]]
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} histogram"
    for bound, count in zip(bounds, counts, strict=True):
        yield f'{name}_bucket{{le="{bound}"}} {_number(count)}'
    yield f"{name}_sum {_number(row[-2])}"
    yield f"{name}_count {_number(row[-1])}"


def _spelled(labels: Labels) -> str:
    # JSON escapes what Prometheus wants to be escaped, in the same way.
    pairs = [f"{name}={json.dumps(value)}" for name, value in labels]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
