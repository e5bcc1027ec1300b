"""What the pipeline did and when: busy time of every resource, and on demand every task.

Times are seconds on the pipeline's clock, real or virtual. Recording tasks is off until asked for,
since a long run has millions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["PipelineCounts", "Resource", "Task", "Trace"]

Resource = Literal["ssd", "link", "link-back", "cpu", "gpu"]
_MOST_TASKS = 200_000


@dataclass(frozen=True, slots=True)
class PipelineCounts:
    """What a pipeline has done since it was made: bytes, and seconds by resource.

    ``clock_s`` is the time now, on the clock that these seconds are of. ``decode_passes`` counts
    the passes of one row, ``decode_cpu_s`` are the CPU's busy seconds in them. Of the experts that
    layers have asked for (``expert_uses``), ``expert_hits`` were in memory. ``expert_prefetches``
    were brought on a guess, ``expert_prefetch_hits`` of them were asked for. ``memory_note`` says
    which weights are no longer where they were at load, and why.
    """

    ssd_read_bytes: int
    link_bytes: int
    busy_s: Mapping[str, float]
    passes: int
    clock_s: float
    decode_passes: int = 0
    decode_cpu_s: float = 0.0
    expert_uses: int = 0
    expert_hits: int = 0
    expert_prefetches: int = 0
    expert_prefetch_hits: int = 0
    memory_note: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One task on a resource, from ``start`` to ``end``."""

    resource: Resource
    name: str
    start: float
    end: float


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
