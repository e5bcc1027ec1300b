"""What passes report of themselves: totals, tasks on a machine's resources, and their clock.

Only names and numbers: ``offload/cards/clock.py`` has the clocks, the wall's and a virtual card's,
which keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

__all__ = ["Clock", "Mark", "PipelineCounts", "Resource", "Task"]

Resource = Literal["ssd", "link", "link-back", "cpu", "gpu"]

Mark: TypeAlias = Any
"""When something has happened: an event of a GPU or a time of a virtual clock; None: it has.

A tuple of events: when all of them have.
"""


@dataclass(frozen=True, slots=True)
class PipelineCounts:
    """What a pipeline has done since it was made: bytes, and seconds by resource.

    ``clock_s`` is the time now, on the clock that these seconds are of. ``decode_passes`` counts
    the passes of one row, ``decode_cpu_s`` are the CPU's busy seconds in them. Of the experts that
    layers have asked for (``expert_uses``), ``expert_hits`` were in memory. ``memory_note`` says
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
    memory_note: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One task on a resource, from ``start`` to ``end``."""

    resource: Resource
    name: str
    start: float
    end: float


class Clock(Protocol):
    """Times tasks and records them."""

    @property
    def simulated(self) -> bool:
        """Whether times are not the wall's."""

    def now(self) -> float:
        """Seconds."""

    def begin(self, resource: Resource) -> float:
        """A task begins; give what is returned to ``end``."""

    def end(
        self,
        resource: Resource,
        name: str,
        started: float,
        *,
        after: Mark = None,
        cost_s: float | None = None,
    ) -> Mark:
        """The task ends; ``cost_s`` is what it takes on the card, None what it took here.

        Returns the mark of its end.
        """
