"""The clock that a pipeline runs on, the wall's or a virtual card's, and what was done when.

A resource does one task after another (the SSD shares its own among threads, and counts as busy
while any is at work). On the virtual clock a task begins when its resource is free and what it
waits for has happened, and takes what the card would take; tasks of the CPU and the SSD take the
time that they took here. Marks are times.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from localrt.models.timing import Mark, Resource, Task

__all__ = ["VirtualClock", "WallClock", "both", "later", "marks_of"]

_MOST_TASKS = 200_000  # a long run has millions


def later(a: Mark, b: Mark) -> Mark:
    """The mark by which both have happened: of two times the later, of two events ``b``.

    Events of one stream happen in order, and those of another are waited for where they arise.
    """
    if isinstance(a, float) and isinstance(b, float):
        return max(a, b)
    return a if b is None else b


def both(a: Mark, b: Mark) -> Mark:
    """As ``later``, where nobody knows which of two events of a stream comes first."""
    if a is None or b is None or (isinstance(a, float) and isinstance(b, float)):
        return later(a, b)
    return (*marks_of(a), *marks_of(b))


def marks_of(mark: Mark) -> tuple[Mark, ...]:
    """What to wait for, one by one."""
    return mark if isinstance(mark, tuple) else (mark,)


class WallClock:
    """Time as it passes; a mark says nothing. See ``Clock``. Thread-safe.

    The latest ``keep`` tasks are remembered, in seconds; none until asked for.
    """

    simulated = False

    def __init__(self, keep: int = 0) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque(maxlen=min(keep, _MOST_TASKS))
        self._busy: dict[str, float] = {}
        self._active: dict[str, tuple[int, float]] = {}  # tasks at work, and since when any

    def now(self) -> float:
        """See ``Clock``."""
        return time.perf_counter()

    def begin(self, resource: Resource) -> float:
        """See ``Clock``."""
        with self._lock:
            now = time.perf_counter()
            count, since = self._active.get(resource, (0, now))
            self._active[resource] = (count + 1, since if count else now)
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
            count, since = self._active[resource]
            self._active[resource] = (count - 1, since)
            if count == 1:
                self._busy[resource] = self._busy.get(resource, 0.0) + now - since
            if self._tasks.maxlen:
                self._tasks.append(Task(resource, name, started, now))

    def busy(self) -> dict[str, float]:
        """Seconds in which each resource has had at least one task, up to now."""
        with self._lock:
            busy, now = dict(self._busy), time.perf_counter()
            for resource, (count, since) in self._active.items():
                if count:
                    busy[resource] = busy.get(resource, 0.0) + now - since
            return busy

    def keep(self, count: int) -> None:
        """Remember the latest ``count`` tasks from now on."""
        with self._lock:
            self._tasks = deque(self._tasks, maxlen=min(count, _MOST_TASKS))

    def tasks(self) -> list[Task]:
        """What is remembered, oldest first."""
        with self._lock:
            return list(self._tasks)


class VirtualClock(WallClock):
    """Time as a card would spend it. Wall time is charged in parts to tasks that overlap."""

    simulated = True

    def __init__(self, keep: int = 0) -> None:
        super().__init__(keep)
        self._free: dict[Resource, float] = {}
        self._now = 0.0

    def now(self) -> float:
        """The end of the last computation."""
        return self._now

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
            count, since = self._active[resource]
            # What has passed since the last end while any was at work: never counted twice.
            self._active[resource] = (count - 1, now)
            took = now - since if cost_s is None else cost_s
            start = max(self._free.get(resource, 0.0), after or 0.0)
            end = self._free[resource] = start + took
            if resource in ("cpu", "gpu"):
                self._now = max(self._now, end)
            self._busy[resource] = self._busy.get(resource, 0.0) + took
            if self._tasks.maxlen:
                self._tasks.append(Task(resource, name, start, end))
            return end

    def busy(self) -> dict[str, float]:
        """Seconds that each resource has been charged."""
        with self._lock:
            return dict(self._busy)
