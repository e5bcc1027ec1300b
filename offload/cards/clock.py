"""The clock that a pipeline runs on: the wall's, or a virtual one for a card that is not there.

A resource does one task after another (the SSD shares its own among threads, and counts as busy
while any is at work). On the virtual clock a task begins when its resource is free and what it
waits for has happened, and takes what the card would take; tasks of the CPU and the SSD take the
time that they took here. Marks are times.
"""

from __future__ import annotations

import threading
import time

from localrt.models.timing import Mark, Resource
from localrt.offload.trace import Trace

__all__ = ["VirtualClock", "WallClock", "later"]


def later(a: Mark, b: Mark) -> Mark:
    """The mark by which both have happened: of two times the later, of two events ``b``.

    Events of one stream happen in order, and those of another are waited for where they arise.
    """
    if isinstance(a, float) and isinstance(b, float):
        return max(a, b)
    return a if b is None else b


class WallClock:
    """Time as it passes; a mark says nothing."""

    simulated = False

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def now(self) -> float:
        """See ``Clock``."""
        return time.perf_counter()

    def begin(self, resource: Resource) -> float:
        """See ``Clock``."""
        return self._trace.begin(resource)

    def end(
        self,
        resource: Resource,
        name: str,
        started: float,
        *,
        after: Mark = None,
        cost_s: float | None = None,
    ) -> Mark:
        """See ``Clock``."""
        self._trace.end(resource, name, started)
        return None


class VirtualClock:
    """Time as a card would spend it."""

    simulated = True

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._free: dict[Resource, float] = {}
        self._busy_here: dict[Resource, tuple[int, float]] = {}  # tasks at work, and since when
        self._now = 0.0

    def now(self) -> float:
        """The end of the last computation."""
        return self._now

    def begin(self, resource: Resource) -> float:
        """See ``Clock``: wall time, of which tasks that overlap are each charged a part."""
        with self._lock:
            now = time.perf_counter()
            count, since = self._busy_here.get(resource, (0, now))
            self._busy_here[resource] = (count + 1, since if count else now)
            return now

    def end(
        self,
        resource: Resource,
        name: str,
        started: float,
        *,
        after: Mark = None,
        cost_s: float | None = None,
    ) -> Mark:
        """See ``Clock``."""
        with self._lock:
            now = time.perf_counter()
            count, since = self._busy_here[resource]
            # What has passed since the last end while any was at work: never counted twice.
            self._busy_here[resource] = (count - 1, now)
            took = now - since if cost_s is None else cost_s
            start = max(self._free.get(resource, 0.0), after or 0.0)
            end = self._free[resource] = start + took
            if resource in ("cpu", "gpu"):
                self._now = max(self._now, end)
            self._trace.record(resource, name, start, end)
            return end
