"""What a pipeline's resources have done and when: the SSD, the link to a GPU, the CPU, the GPU.

A resource counts as busy while it has any task: several threads may share it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from localrt.models.residency import Resource, Task

_MOST_TASKS = 200_000  # a long run has millions


class Clock:
    """Times tasks. Thread-safe.

    The latest ``keep`` tasks are remembered, in seconds; none until asked for.
    """

    def __init__(self, keep: int = 0) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque(maxlen=min(keep, _MOST_TASKS))
        self._busy: dict[str, float] = {}
        self._active: dict[str, tuple[int, float]] = {}  # tasks at work, and since when any

    def begin(self, resource: Resource) -> float:
        """A task begins; give what is returned to ``end``."""
        with self._lock:
            now = time.perf_counter()
            count, since = self._active.get(resource, (0, now))
            self._active[resource] = (count + 1, since if count else now)
            return now

    def end(self, resource: Resource, name: str, started: float) -> None:
        """The task ends."""
        with self._lock:
            now = time.perf_counter()
            count, since = self._active[resource]
            self._active[resource] = (count - 1, since)
            if count == 1:
                self._busy[resource] = self._busy.get(resource, 0.0) + now - since
            if self._tasks.maxlen:
                self._tasks.append(Task(resource, name, max(started, since), now))

    @contextmanager
    def task(self, resource: Resource, name: str) -> Iterator[None]:
        """Around a task."""
        started = self.begin(resource)
        try:
            yield
        finally:
            self.end(resource, name, started)

    @contextmanager
    def pause(self, resource: Resource, name: str) -> Iterator[None]:
        """While the only task of a resource waits for another: it counts as two tasks."""
        self.end(resource, name, 0.0)
        try:
            yield
        finally:
            self.begin(resource)

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
