"""What the pipeline did and when: busy time of every resource, and on demand every task.

Times are seconds on the pipeline's clock, real or virtual. Recording tasks is off until asked for,
since a long run has millions.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from localrt.models.timing import Resource, Task

__all__ = ["Trace"]

_MOST_TASKS = 200_000


class Trace:
    """Thread-safe. ``keep`` tasks are remembered, the latest; 0 remembers none."""

    def __init__(self, keep: int = 0) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque(maxlen=min(keep, _MOST_TASKS))
        self._busy: dict[str, float] = {}
        self._active: dict[str, tuple[int, float]] = {}  # tasks running, and since when any

    def begin(self, resource: Resource) -> float:
        """A task begins now; returns when."""
        with self._lock:
            now = time.perf_counter()
            count, since = self._active.get(resource, (0, now))
            self._active[resource] = (count + 1, since if count else now)
            return now

    def end(self, resource: Resource, name: str, start: float) -> float:
        """The task that began at ``start`` ends now; returns when."""
        with self._lock:
            now = time.perf_counter()
            count, since = self._active[resource]
            self._active[resource] = (count - 1, since)
            if count == 1:
                self._busy[resource] = self._busy.get(resource, 0.0) + now - since
            if self._tasks.maxlen:
                self._tasks.append(Task(resource, name, start, now))
            return now

    def record(self, resource: Resource, name: str, start: float, end: float) -> None:
        """Add a task of another clock; those of one resource must not overlap."""
        with self._lock:
            self._busy[resource] = self._busy.get(resource, 0.0) + end - start
            if self._tasks.maxlen:
                self._tasks.append(Task(resource, name, start, end))

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
